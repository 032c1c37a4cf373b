"""Compares the tokenizer and the chat templates with PyPI tokenizers, tiktoken and jinja2.

Usage: differential_test.py HELPER [--count N] [--seed S] [--only tokenizer|template]
Exit status 77, which CTest reads as skipped, when the packages are missing.
"""

import argparse
import json
import pathlib
import random
import subprocess
import sys
import tempfile

SOURCE = pathlib.Path(__file__).resolve().parents[2]
SKIPPED = 77

try:
    from tokenizers import Tokenizer

    import differential_tiktoken
    from differential_strings import TextGenerator
    from differential_templates import TemplateGenerator, fixed_cases, render
    from differential_tokenizers import SPECIAL, all_tokenizers
except ImportError as error:
    print(f"skipped: {error}; install tests/requirements.txt")
    sys.exit(SKIPPED)


class Helper:
    def __init__(self, path):
        self.process = subprocess.Popen([path], stdin=subprocess.PIPE, stdout=subprocess.PIPE)

    def ask(self, **request):
        self.process.stdin.write(json.dumps(request).encode() + b"\n")
        self.process.stdin.flush()
        line = self.process.stdout.readline()
        if not line:
            raise RuntimeError(f"the helper died on {json.dumps(request)}")
        return json.loads(line)


class Report:
    def __init__(self):
        self.compared = 0
        self.failed = 0

    def check(self, what, got, expected):
        self.compared += 1
        if got == expected:
            return
        self.failed += 1
        if self.failed <= 10:
            print(f"{what}\n  got      {got!r}\n  expected {expected!r}")


def compare_tokenizer(helper, report, name, folder, texts, count):
    oracle = Tokenizer.from_file(str(folder / "tokenizer.json"))
    loaded = helper.ask(op="load", folder=str(folder))
    if "error" in loaded:
        report.check(f"{name}: load", loaded, "no error")
        return
    size = loaded["size"]
    for index in range(count):
        text = texts.text()
        add = bool(index % 2)
        expected = oracle.encode(text, add_special_tokens=add).ids
        got = helper.ask(op="encode", text=text, add_special_tokens=add)
        report.check(f"{name}: encode {text!r}", got.get("ids", got), expected)
        compare_decode(helper, report, name, oracle, expected, texts.random)
        random_ids = [texts.random.randrange(size + 2) for _ in range(texts.random.randint(0, 12))]
        compare_decode(helper, report, name, oracle, random_ids, texts.random)


def compare_decode(helper, report, name, oracle, ids, rng):
    skip = bool(rng.randrange(2))
    expected = oracle.decode(ids, skip_special_tokens=skip)
    got = helper.ask(op="decode", ids=ids, skip_special_tokens=skip)
    wanted = {"text": expected, "streamed": expected}
    report.check(f"{name}: decode {ids} skip={skip}", got, wanted)


def compare_invalid_utf8(helper, report, count, rng):
    """Bytes that are no UTF-8 are encoded as the text that Python reads from them."""
    folder = SOURCE / "models/tiny-nemotron-h"
    oracle = Tokenizer.from_file(str(folder / "tokenizer.json"))
    helper.ask(op="load", folder=str(folder))
    seeds = ["é", "日", "🙂", "a", "\x80", "\u07ff", "\ufffd"]
    for _ in range(count):
        data = bytearray("".join(rng.choice(seeds) for _ in range(rng.randint(1, 6))).encode())
        for _ in range(rng.randint(1, 4)):
            data[rng.randrange(len(data))] = rng.choice(
                [rng.randrange(256), 0xED, 0xF4, 0xE0, 0xC0]
            )
        expected = oracle.encode(bytes(data).decode("utf-8", "replace")).ids
        got = helper.ask(op="encode", hex=data.hex(), add_special_tokens=True)
        report.check(f"encode {bytes(data)!r}", got.get("ids", got), expected)


def run_tokenizers(helper, report, count, seed):
    texts = TextGenerator(seed, SPECIAL)
    corpus = (SOURCE / "models/eval.txt").read_text()[:60000]
    with tempfile.TemporaryDirectory() as scratch:
        folders = [(name, SOURCE / "models" / name) for name in ("tiny-nemotron-h", "tiny-qwen3.5")]
        for name, tokenizer in all_tokenizers(corpus):
            folder = pathlib.Path(scratch) / name
            folder.mkdir()
            tokenizer.save(str(folder / "tokenizer.json"))
            folders.append((name, folder))
        for name, folder in folders:
            compare_tokenizer(helper, report, name, folder, texts, count // len(folders) + 1)
    compare_invalid_utf8(helper, report, count // 10 + 1, texts.random)
    differential_tiktoken.compare(helper, report, count // 4 + 1, seed, corpus)


def compare_template(helper, report, template, variables):
    expected = render(template, variables)
    got = helper.ask(op="render", template=template, variables=variables)
    if expected is None:
        report.check(f"{template!r} with {variables}", "error" in got, True)
    else:
        report.check(f"{template!r} with {variables}", got.get("text", got), expected)


def run_templates(helper, report, count, seed):
    for template, variables in fixed_cases():
        compare_template(helper, report, template, variables)
    generator = TemplateGenerator(seed)
    for _ in range(count):
        compare_template(helper, report, generator.template(), generator.variables())


def main():
    parser = argparse.ArgumentParser()
    parser.add_argument("helper")
    parser.add_argument("--count", type=int, default=2500)
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--only", choices=["tokenizer", "template"])
    options = parser.parse_args()
    helper, report = Helper(options.helper), Report()
    random.seed(options.seed)
    if options.only != "template":
        run_tokenizers(helper, report, options.count, options.seed)
    if options.only != "tokenizer":
        run_templates(helper, report, options.count, options.seed)
    print(f"{report.compared} compared, {report.failed} different")
    return 1 if report.failed else 0


if __name__ == "__main__":
    sys.exit(main())
