"""Random templates for the differential test, and the oracle that renders them."""

import json
import random
import signal

import jinja2
import jinja2.ext
import jinja2.nodes
from jinja2.sandbox import ImmutableSandboxedEnvironment

from template_styles import MESSAGES, STYLES


class _Generation(jinja2.ext.Extension):
    tags = {"generation"}

    def parse(self, parser):
        line = next(parser.stream).lineno
        body = parser.parse_statements(["name:endgeneration"], drop_needle=True)
        call = self.call_method("_render")
        return jinja2.nodes.CallBlock(call, [], [], body).set_lineno(line)

    def _render(self, caller):
        return caller()


def _raise_exception(message):
    raise jinja2.exceptions.TemplateError(message)


def _tojson(value, ensure_ascii=False, indent=None, separators=None, sort_keys=False):
    return json.dumps(value, ensure_ascii=ensure_ascii, indent=indent, separators=separators,
                      sort_keys=sort_keys)


def _environment():
    """Set up as the published chat templates are rendered."""
    environment = ImmutableSandboxedEnvironment(
        trim_blocks=True, lstrip_blocks=True, extensions=[_Generation, jinja2.ext.loopcontrols]
    )
    environment.filters["tojson"] = _tojson
    environment.globals["raise_exception"] = _raise_exception
    return environment


_ENVIRONMENT = _environment()


def render(template, variables):
    """The text, or None for any error."""
    try:
        return _ENVIRONMENT.from_string(template).render(**variables)
    except Exception:  # Python's and Jinja's own errors: all of them are one to a user
        return None


def fixed_cases():
    for template in STYLES:
        for messages in MESSAGES:
            for prompt in (False, True):
                for extra in ({}, {"enable_thinking": False}, {"tools": _TOOLS}):
                    yield template, {
                        "messages": messages, "add_generation_prompt": prompt,
                        "bos_token": "<s>", "eos_token": "</s>", **extra,
                    }


_TOOLS = [
    {"type": "function", "function": {
        "name": "get_weather", "description": "The weather <now> & \"later\" in a city: 東京, Zürich",
        "parameters": {"type": "object", "required": ["city"], "properties": {
            "city": {"type": "string", "description": "Name"},
            "days": {"type": ["integer", "null"], "enum": [1, 2.5, None, True], "default": 1e-7}}}}},
    {"type": "function", "function": {"name": "noop", "parameters": {}}},
]

_VARIABLES = {
    "i": 7, "n": -3, "z": 0, "f": 2.5, "big": 1e17, "s": "Hello World", "e": "", "u": "naïve 日本 🙂 ß",
    "w": "  pad\n\ttab ", "q": "it's \"quoted\" \\ <b>&", "t": True, "no": False, "none_": None,
    "l": [3, 1, 2], "ls": ["b", "A", "c", "a"], "el": [], "nl": [[1, 2], ["x"], []],
    "d": {"a": 1, "b": [1, 2], "items": "shadow", "é": None}, "ed": {},
    "m": [{"role": "user", "content": "hi", "n": 2}, {"role": "assistant", "content": None, "n": 1},
          {"role": "user", "content": "bye", "n": 2}],
}
_NAMES = [*_VARIABLES, "missing"]
_STRINGS = ["a", "", " ", "l", "o", "Hello", "\n", "ab c", "x,y", "%s-%s", "{}", "é", "'", "<|x|>", "role"]
_FILTERS = [
    "trim", "upper", "lower", "length", "count", "string", "list|string", "first", "last", "sort|string", "title",
    "capitalize", "tojson", "tojson(indent=2)", "tojson(ensure_ascii=true)", "tojson(sort_keys=true)",
    "tojson(separators=(',', ':'))", "join", "join(', ')", "default('dflt')", "default('dflt', true)",
    "d", "reverse|list", "unique|list", "int", "float", "int(5)", "abs", "round", "round(1)", "max", "min", "sum",
    "items|list", "dictsort", "dictsort(false, 'value')", "map('upper')|list", "map('string')|join('|')",
    "select|list", "reject|list", "select('string')|list", "reject('none')|list", "selectattr('role')|list",
    "selectattr('role', 'equalto', 'user')|list", "rejectattr('content', 'none')|list",
    "map(attribute='role')|list", "map(attribute='x', default='y')|join(' ')", "map('first')|list",
    "batch(2)|list", "batch(2, 0)|list", "slice(2)|list", "indent", "indent(2, true)", "indent(2, blank=true)",
    "replace('l', 'L')", "replace('l', '', 1)", "wordcount", "center(12)", "truncate(6)", "truncate(6, true)",
    "e|length", "escape|length", "safe|length", "groupby('role')|list", "sort(attribute='n')|list", "sort(reverse=true)|list",
    "format('x')", "urlencode", "attr('zz')|string|length", "sort(attribute='n,content')|list|length",
]
_TESTS = [
    "defined", "undefined", "none", "boolean", "true", "false", "integer", "float", "number", "string", "mapping",
    "sequence", "iterable", "callable", "odd", "even", "divisibleby(3)", "divisibleby 2", "lower", "upper",
    "sameas none", "in [1, 'a', 7]", "eq 7", "equalto('a')", "ne 1", "gt 2", "lessthan 5", "ge 2.5", "filter", "test",
]
_METHODS = [
    "strip()", "lstrip()", "rstrip('d')", "strip('H d')", "upper()", "lower()", "title()", "capitalize()",
    "split()", "split(' ')", "split('l', 1)", "rsplit('l', 1)", "rsplit(None, 1)", "split(maxsplit=1)",
    "splitlines()", "splitlines(true)", "startswith('H')", "endswith(('d', 'x'))", "startswith('e', 1)", "find('o')", "rfind('o')",
    "index('o')", "count('l')", "replace('l', 'LL')", "replace('', '-')", "join(['a', 'b'])", "partition('o')",
    "rpartition('o')", "removeprefix('He')", "removesuffix('ld')", "ljust(14)", "rjust(14, '.')", "center(15, '*')",
    "zfill(13)", "isdigit()", "isalpha()", "isspace()", "isupper()", "islower()", "isalnum()", "swapcase()",
    "format(1, 2)", "get('a')", "get('zz')", "get('zz', 3)", "items()|list", "keys()|list", "values()|list",
    "index(1)", "count(1)", "append(1)", "update({})", "pop()", "a", "role", "0", "missing", "copy()", "find('l', 3, 6)", "__class__",
]
_INDICES = ["0", "1", "-1", "-9", "'a'", "'role'", "1:", ":1", "::-1", "1:-1", "::2", "-2:", "5:1:-1", "i", ":n", "none", "f"]


class TemplateGenerator:
    def __init__(self, seed):
        self.random = random.Random(seed)

    def variables(self):
        return _VARIABLES

    def string(self):
        return repr(self.random.choice(_STRINGS))

    def atom(self):
        r = self.random
        kind = r.randrange(10)
        if kind < 5:
            return r.choice(_NAMES)
        if kind < 7:
            return self.string()
        return r.choice(["0", "1", "2", "-5", "3.5", "1e3", "0x1F", "1_000", "true", "false", "none", "[]", "{}", "()",
                         "(1,)", "'a' 'b'", "[1, 'a', [2]]", "{'k': 1, 2: 'v'}", "(1, 'x')", "(range(3)|list)"])

    def expression(self, depth=0):
        r = self.random
        if depth > 3:
            return self.atom()
        sub = lambda: self.expression(depth + 1)  # noqa: E731
        kind = r.randrange(20)
        if kind < 4:
            return self.atom()
        if kind < 7:
            return f"{sub()}|{r.choice(_FILTERS)}"
        if kind < 9:
            return f"{self.atom()}.{r.choice(_METHODS)}"
        if kind == 9:
            return f"{r.choice(_NAMES)}[{r.choice(_INDICES)}]"
        if kind == 10:
            return f"{sub()} is {r.choice(['', 'not '])}{r.choice(_TESTS)}"
        if kind < 13:
            return f"{sub()} {r.choice(['+', '-', '*', '/', '//', '%', '~', '~', '**'])} {sub()}"
        if kind == 13:
            return f"({sub()} {r.choice(['and', 'or'])} {sub()})"
        if kind == 14:
            return f"not {sub()}"
        if kind == 15:
            return f"{sub()} {r.choice(['==', '!=', '<', '<=', '>', '>=', 'in', 'not in'])} {sub()}"
        if kind == 16:
            return f"({sub()} if {sub()}{r.choice(['', ' else ' + self.atom()])})"
        if kind == 17:
            return f"({sub()})"
        if kind == 18:
            return f"{self.atom()} < {self.atom()} <= {sub()}"
        return f"[{sub()}, {sub()}]"

    def text(self):
        return self.random.choice(
            ["x", " ", "\n", "\n  ", "  \n", "\t", "text\n", "<|a|>", "{", "}", "%", "\r\n", "\u00a0\n ", "{# c #}",
             "{#- c -#}", "  {#+ c #}\n", "{% raw %} {{ r }} {% endraw %}", "{%- raw -%}\n a\n {%- endraw -%}\n"])

    def open_tag(self):
        return self.random.choice(["{%", "{%", "{%-", "{%+"])

    def close_tag(self):
        return self.random.choice(["%}", "%}", "-%}", "+%}"])

    def tag(self, code):
        return f"{self.open_tag()} {code} {self.close_tag()}"

    def body(self, depth):
        return "".join(self.statement(depth) for _ in range(self.random.randint(1, 3)))

    def loop(self, depth):
        r = self.random
        targets = r.choice(["x", "x", "a, b", "i"])
        iterable = r.choice(["l", "ls", "m", "el", "d", "d.items()", "d|items", "nl", "s", "range(3)", "missing",
                             "[[1, 2], [3, 4]]", "l if t else ls", self.atom()])
        test = r.choice(["", "", " if x", " if x is string"])
        if " if " in iterable:
            test = ""
        inner = r.choice(["{{ x }}", "{{ loop.index }}", "{{ loop.first }}{{ loop.last }}", "{{ loop.revindex0 }}",
                          "{{ loop.previtem }}|{{ loop.nextitem }}", "{{ loop.length }}", "{{ loop.cycle('a', 'b') }}",
                          "{{ loop.changed(x) }}", "{{ a }}{{ b }}", "{% if loop.index0 == 1 %}{% break %}{% endif %}",
                          "{% if loop.first %}{% continue %}{% endif %}{{ x }}", "{% set e = x %}{{ e }}"])
        otherwise = r.choice(["", self.tag("else") + "none"])
        return (self.tag(f"for {targets} in {iterable}{test}") + inner + self.body(depth + 1) + otherwise
                + self.tag("endfor"))

    def macro(self, depth):
        r = self.random
        signature = r.choice(["", "p", "p, q=1", "p=s, q=p"])
        call = r.choice(["", "1", "1, 2", "p=3", "q=2", "*l", "**{'p': 1}", "i, q=u"])
        inner = r.choice(["", "{{ p }}", "{{ p }}{{ q }}", "{{ varargs }}", "{{ kwargs }}", "{{ caller() }}"])
        define = self.tag(f"macro mac({signature})") + inner + self.body(depth + 1) + self.tag("endmacro")
        use = r.choice([f"{{{{ mac({call}) }}}}", f"{{{{- mac({call})|upper -}}}}",
                        self.tag(f"call mac({call})") + "called" + self.tag("endcall")])
        return define + use

    def statement(self, depth=0):
        r = self.random
        kind = r.randrange(12) if depth < 3 else r.randrange(5)
        if kind < 2:
            return self.text()
        if kind < 4:
            return f"{r.choice(['{{', '{{-', '{{+'])} {self.expression()} {r.choice(['}}', '-}}'])}"
        if kind == 4:
            return self.tag(f"set {r.choice(['x', 'y', 'x, y', 'ns.v'])} = {self.expression()}")
        if kind == 5:
            middle = r.choice(["", self.tag(f"elif {self.expression()}") + self.body(depth + 1),
                               self.tag("else") + self.body(depth + 1)])
            return self.tag(f"if {self.expression()}") + self.body(depth + 1) + middle + self.tag("endif")
        if kind < 8:
            return self.loop(depth)
        if kind == 8:
            return self.macro(depth)
        if kind == 9:
            return (self.tag("set ns = namespace(v=1)") + self.tag("for x in l") + self.tag("set ns.v = ns.v + x")
                    + self.tag("endfor") + "{{ ns.v }}")
        if kind == 10:
            name = r.choice(["set x", "set x|upper", "filter upper", "filter trim|length", "with x=1, y=i", "generation"])
            return self.tag(name) + self.body(depth + 1) + self.tag("end" + name.split()[0].split("|")[0]) + "{{ x }}"
        return self.tag(r.choice(["print s, i", "set y = x", "frob", "if", "endif", "set 1 = 2", "set true = 1"]))

    def template(self):
        return "".join(self.statement() for _ in range(self.random.randint(1, 4)))
