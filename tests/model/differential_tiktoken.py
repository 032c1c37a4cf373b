"""Compares tiktoken.model with PyPI tiktoken, under Kimi's rules of cutting text into pieces."""

import base64
import collections
import json
import pathlib
import tempfile

import tiktoken
from differential_strings import TextGenerator

_WORD = r"\p{Lm}\p{Lo}\p{M}&&[^\p{Han}]"
_UPPER, _LOWER = rf"[\p{{Lu}}\p{{Lt}}{_WORD}]", rf"[\p{{Ll}}{_WORD}]"
_CONTRACTION = r"(?i:'s|'t|'re|'ve|'m|'ll|'d)?"
KIMI = "|".join(
    [
        r"[\p{Han}]+",
        rf"[^\r\n\p{{L}}\p{{N}}]?{_UPPER}*{_LOWER}+{_CONTRACTION}",
        rf"[^\r\n\p{{L}}\p{{N}}]?{_UPPER}+{_LOWER}*{_CONTRACTION}",
        r"\p{N}{1,3}",
        r" ?[^\s\p{L}\p{N}]+[\r\n]*",
        r"\s*[\r\n]+",
        r"\s+(?!\S)",
        r"\s+",
    ]
)
NAMED = {
    0: ("[BOS]", True),
    2: ("<|im_end|>", True),
    3: ("<|im_end|>x", True),
    11: ("<call>", False),
}
# Han beside letters, and characters that are Han by script, by extension, or not at all.
HAN = [
    "中文English混合",
    "汉字",
    "々〇〆",
    "、。「」",
    "ーカナ",
    "㆐㈠",
    "国's",
    "漢CASEword'LL",
    "한漢",
    "𠀋",
]


def _ranks(text, rng):
    """Single bytes in any order, then frequent byte strings: of one token many splits are tokens."""
    data = (text + "".join(HAN) * 40 + "aaaaaaa" * 30).encode()
    counts = collections.Counter(
        data[i : i + length] for length in (2, 3, 4, 6, 9) for i in range(len(data) - length + 1)
    )
    frequent = [piece for piece, _ in counts.most_common(3000)]
    singles = [bytes([i]) for i in range(256)]
    rng.shuffle(singles)
    rng.shuffle(frequent)
    return {piece: rank for rank, piece in enumerate(singles + frequent)}


def _specials(first):
    return {NAMED.get(i, (f"<|reserved_token_{first + i}|>",))[0]: first + i for i in range(256)}


def _write(folder, ranks):
    lines = (f"{base64.b64encode(piece).decode()} {rank}\n" for piece, rank in ranks.items())
    (folder / "tiktoken.model").write_text("".join(lines))
    named = {
        str(len(ranks) + i): {"content": content, "special": special}
        for i, (content, special) in NAMED.items()
    }
    config = {"tokenizer_class": "TikTokenTokenizer", "added_tokens_decoder": named}
    (folder / "tokenizer_config.json").write_text(json.dumps(config))


def compare(helper, report, count, seed, corpus):
    specials = [content for content, _ in NAMED.values()]
    texts = TextGenerator(seed, specials + HAN)
    rng = texts.random
    ranks = _ranks(corpus, rng)
    oracle = tiktoken.Encoding(
        "kimi", pat_str=KIMI, mergeable_ranks=ranks, special_tokens=_specials(len(ranks))
    )
    skipped = {len(ranks) + i for i in range(256) if NAMED.get(i, ("", True))[1]}
    with tempfile.TemporaryDirectory() as scratch:
        folder = pathlib.Path(scratch)
        _write(folder, ranks)
        loaded = helper.ask(op="load", folder=str(folder))
        report.check("tiktoken: load", loaded, {"size": len(ranks) + 256})
        for index in range(count):
            text = texts.text() if index else "aaaaaaaaa" * 40
            expected = oracle.encode(text, allowed_special="all")
            got = helper.ask(op="encode", text=text, add_special_tokens=True)
            report.check(f"tiktoken: encode {text!r}", got.get("ids", got), expected)
            chosen = expected + [rng.randrange(len(ranks) + 256) for _ in range(rng.randint(0, 6))]
            skip = bool(rng.randrange(2))
            kept = [i for i in chosen if not (skip and i in skipped)]
            wanted = oracle.decode_bytes(kept).decode("utf-8", "replace")
            got = helper.ask(op="decode", ids=chosen, skip_special_tokens=skip)
            both = {"text": wanted, "streamed": wanted}
            report.check(f"tiktoken: decode {chosen} skip={skip}", got, both)
