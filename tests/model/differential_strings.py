"""Random texts for the differential test of the tokenizer."""

import random
import unicodedata

from tokenizers import normalizers

# Texts keep to characters whose properties all sides know. PCRE2 10.42 has Unicode 14.0, Python 3.11
# too; the tokenizers library has 17.0 in its regular expressions (9,465 more characters, of which
# the sides rightly disagree) but an old table in its NFC, which takes some marks for starters.
_NEWEST = "14.0.0"


def _known_to_normalizer(character):
    nfc = normalizers.NFC().normalize_str
    parts = unicodedata.normalize("NFD", character)
    probes = [character, parts, f"a{character}\u0323", f"a\u0301{character}", f"a{character}\u0334"]
    return all(nfc(probe) == unicodedata.normalize("NFC", probe) for probe in probes)


_SPACES = [chr(c) for c in (
    0x09, 0x0A, 0x0B, 0x0C, 0x0D, 0x1C, 0x1D, 0x1E, 0x1F, 0x20, 0x85, 0xA0, 0x1680, 0x180E,
    0x2000, 0x2003, 0x200A, 0x200B, 0x200C, 0x200D, 0x2028, 0x2029, 0x202F, 0x205F, 0x2060,
    0x3000, 0xFEFF)]
_MARKS = [chr(c) for c in (0x300, 0x301, 0x308, 0x323, 0x327, 0x338, 0x345, 0x5B0, 0x93C, 0x1161,
                           0x11A8, 0x3099, 0xFE0F, 0x1D165)]
_WORDS = ["the", "hello", "World", "don't", "I'LL", "we've", "it's", "'S", "\u017f", "ca\u017f'\u017f",
          "straße", "e\u0301", "Ａ½ﬁ", "naïve", "日本語", "テキスト", "한국어", "\u1112\u1161\u11ab", "привет", "مرحبا",
          "हिन्दी", "123", "3.14", "1e-9", "٣٤٥", "x²", "Ⅷ", "foo_bar", "CamelCaseWORD", "/path/to", "\r\n",
          "\n\n\n", "  ", "    ", "\t", "...", "!!", "=>", "🙂", "👩‍👩‍👧", "🇩🇪", "\u212a", "ǅ", "ʰ", "\u0345"]


def _characters():
    if unicodedata.unidata_version != _NEWEST:
        raise ImportError(f"Python has Unicode {unicodedata.unidata_version}, not {_NEWEST}")
    unknown_parts = set()
    known = []
    for code in range(0x110000):
        character = chr(code)
        category = unicodedata.category(character)
        if category in ("Cn", "Cs", "Co"):
            continue
        if (category[0] == "M" or unicodedata.decomposition(character)) and not _known_to_normalizer(
            character
        ):
            unknown_parts.update(unicodedata.normalize("NFD", character))
            continue
        known.append(character)
    return [character for character in known if character not in unknown_parts]


class TextGenerator:
    def __init__(self, seed, special):
        self.random = random.Random(seed)
        self.special = special
        self.by_category = {}
        for character in _characters():
            self.by_category.setdefault(unicodedata.category(character), []).append(character)
        self.categories = sorted(self.by_category)

    def piece(self):
        r = self.random
        kind = r.randrange(12)
        if kind < 4:
            return r.choice(_WORDS)
        if kind < 6:
            return r.choice([" ", " ", "\n"]) * r.randint(1, 4)
        if kind == 6:
            return r.choice(_SPACES) * r.randint(1, 3)
        if kind == 7:
            return "".join(r.choice(_MARKS) for _ in range(r.randint(1, 5)))
        if kind == 8 and self.special:
            return r.choice(self.special)
        if kind == 9:
            return chr(r.randint(0, 0x7F)) * r.randint(1, 3)
        category = r.choice(self.categories)
        return "".join(r.choice(self.by_category[category]) for _ in range(r.randint(1, 4)))

    def text(self):
        r = self.random
        text = "".join(self.piece() for _ in range(r.choice([1, 2, 4, 8, 16])))
        if r.randrange(200) == 0:  # long pieces take another path through byte-pair encoding
            text += r.choice([" ", "a", "=", "ab", "é", "the"]) * r.randint(50, 500)
        return text
