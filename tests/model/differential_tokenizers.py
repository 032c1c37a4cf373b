"""Tokenizers of every supported kind, trained on a small text."""

from tokenizers import AddedToken, Regex, Tokenizer, decoders, models, normalizers
from tokenizers import pre_tokenizers, processors, trainers

LLAMA3 = (
    r"(?i:'s|'t|'re|'ve|'m|'ll|'d)|[^\r\n\p{L}\p{N}]?\p{L}+|\p{N}{1,3}| ?[^\s\p{L}\p{N}]+[\r\n]*"
    r"|\s*[\r\n]+|\s+(?!\S)|\s+"
)
O200K = (
    r"[^\r\n\p{L}\p{N}]?[\p{Lu}\p{Lt}\p{Lm}\p{Lo}\p{M}]*[\p{Ll}\p{Lm}\p{Lo}\p{M}]+(?i:'s|'t|'re)?"
    r"|\p{N}{1,3}+| ?[^\s\p{L}\p{N}]+[\r\n/]*|\s*[\r\n]+|\s+(?!\S)|\s+"
)
CLASSES = r"\w+|\W|\d+$|^\h"


def _byte_level(**options):
    return pre_tokenizers.ByteLevel(**{"add_prefix_space": False, "use_regex": False, **options})


def _split(pattern, behavior="isolated", invert=False):
    return pre_tokenizers.Split(pattern, behavior, invert)


def _sequence(*steps):
    return pre_tokenizers.Sequence(list(steps))


PRE_TOKENIZERS = {
    "gpt2": _byte_level(use_regex=True),
    "gpt2-prefix": _byte_level(use_regex=True, add_prefix_space=True),
    "no-regex": _byte_level(),
    "llama3": _sequence(_split(Regex(LLAMA3)), _byte_level()),
    "o200k": _sequence(_split(Regex(O200K)), _byte_level()),
    "classes": _sequence(_split(Regex(CLASSES)), _byte_level()),
    "digits": _sequence(pre_tokenizers.Digits(individual_digits=True), _byte_level(use_regex=True)),
    "digit-runs": _sequence(pre_tokenizers.Digits(individual_digits=False), _byte_level()),
    "removed": _sequence(_split(Regex(r"\s+"), "removed"), _byte_level(add_prefix_space=True)),
    "previous": _sequence(_split(" ", "merged_with_previous"), _byte_level()),
    "next": _sequence(_split(Regex(r"\s"), "merged_with_next"), _byte_level()),
    "contiguous": _sequence(_split(Regex(r"\p{L}"), "contiguous"), _byte_level()),
    "invert": _sequence(_split(Regex(r"\p{L}+|\p{N}"), "removed", True), _byte_level()),
    "invert-next": _sequence(_split(Regex(r"\p{L}+"), "merged_with_next", True), _byte_level()),
    "empty-matches": _sequence(_split(Regex(r"(?=[A-Z])|x*")), _byte_level()),
    "literal": _sequence(_split(".", "isolated"), _split("the", "removed"), _byte_level()),
}

ADDED = [
    AddedToken("<|im_start|>", special=True, normalized=False),
    AddedToken("<|im_start|>user", special=True, normalized=False),
    AddedToken("<l>", lstrip=True, special=True, normalized=False),
    AddedToken("<r>", rstrip=True, special=False, normalized=False),
    AddedToken("<lr>", lstrip=True, rstrip=True, normalized=False),
    AddedToken("word", single_word=True, normalized=False),
    AddedToken("é", normalized=True),
    AddedToken("e\u0301x", normalized=True, special=True),
    AddedToken("ab c", single_word=True, lstrip=True, normalized=True),
    AddedToken("日本", normalized=False),
    AddedToken(" ", rstrip=True, normalized=True),
    AddedToken("  \n", normalized=False),
]
SPECIAL = [token.content for token in ADDED] + ["<|im_end|>", "<|endoftext|>", "<s>", "wordy"]


def train(text, name):
    tokenizer = Tokenizer(models.BPE(ignore_merges=name in ("llama3", "removed")))
    tokenizer.pre_tokenizer = PRE_TOKENIZERS[name]
    tokenizer.decoder = decoders.ByteLevel()
    if name in ("gpt2", "classes", "digit-runs", "contiguous"):
        tokenizer.normalizer = normalizers.NFC()
    if name == "next":
        tokenizer.normalizer = normalizers.Sequence([normalizers.NFC()])
    alphabet = pre_tokenizers.ByteLevel.alphabet()
    trainer = trainers.BpeTrainer(
        vocab_size=600, special_tokens=["<s>", "</s>"], initial_alphabet=alphabet, show_progress=False
    )
    tokenizer.train_from_iterator(text.splitlines(keepends=True), trainer)
    if name in ("gpt2", "llama3", "digits", "removed", "next", "o200k"):
        tokenizer.add_tokens(ADDED)
    if name == "llama3":
        template = processors.TemplateProcessing(
            single="<s> $A </s>", pair="$A $B", special_tokens=[("<s>", 0), ("</s>", 1)]
        )
        byte_level = processors.ByteLevel(trim_offsets=False)
        tokenizer.post_processor = processors.Sequence([byte_level, template])
    return tokenizer


def with_unknown(text, fuse):
    """A vocabulary that lacks most bytes."""
    model = models.BPE(unk_token="<unk>", fuse_unk=fuse)
    tokenizer = Tokenizer(model)
    tokenizer.pre_tokenizer = PRE_TOKENIZERS["llama3"]
    tokenizer.decoder = decoders.Sequence([decoders.ByteLevel()])
    trainer = trainers.BpeTrainer(vocab_size=200, special_tokens=["<unk>"], show_progress=False)
    tokenizer.train_from_iterator([line for line in text.splitlines() if line.isascii()], trainer)
    return tokenizer


def without_unknown(text):
    """As with_unknown, but missing bytes vanish."""
    tokenizer = Tokenizer(models.BPE())
    tokenizer.pre_tokenizer = PRE_TOKENIZERS["gpt2"]
    tokenizer.decoder = decoders.ByteLevel()
    trainer = trainers.BpeTrainer(vocab_size=200, show_progress=False)
    tokenizer.train_from_iterator([line for line in text.splitlines() if line.isascii()], trainer)
    return tokenizer


def all_tokenizers(text):
    for name in PRE_TOKENIZERS:
        yield name, train(text, name)
    yield "unknown", with_unknown(text, False)
    yield "unknown-fused", with_unknown(text, True)
    yield "without-unknown", without_unknown(text)
