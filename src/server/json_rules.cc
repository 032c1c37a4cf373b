#include "server/json_rules.h"

#include <initializer_list>

namespace replayssm::server {

using Alternative = Grammar::Alternative;

Alternative operator+(Alternative a, const Alternative& b) {
  a.insert(a.end(), b.begin(), b.end());
  return a;
}

JsonRules::JsonRules(Grammar& grammar) : g(grammar) {
  add_space();
  add_text();
  add_numbers();
  value = g.add_rule();
  object = list("{", "}", g.rule({call(text), call(space), one_of(":"), call(space), call(value)}));
  array = list("[", "]", value);
  for (const int32_t rule : {text, number, object, array}) g.add_alternative(value, {call(rule)});
  for (const char* word : {"true", "false", "null"}) g.add_alternative(value, literal(word));
}

int32_t JsonRules::list(std::string_view open, std::string_view close, int32_t item) const {
  const int32_t rest = g.add_rule();
  g.add_alternative(rest, literal(close));
  g.add_alternative(rest, {one_of(","), call(space), call(item), call(space), call(rest)});
  const int32_t whole = g.rule(literal(open) + Alternative{call(space)} + literal(close));
  g.add_alternative(whole,
                    literal(open) + Alternative{call(space), call(item), call(space), call(rest)});
  return whole;
}

// Bounded: a model could go on with blanks for ever.
void JsonRules::add_space() {
  constexpr int kMostBlanks = 16;
  int32_t blanks = g.rule({});
  for (int i = 0; i < kMostBlanks; ++i) {
    const int32_t more = g.rule({});
    g.add_alternative(more, {one_of(" "), call(blanks)});
    blanks = more;
  }
  space = g.rule({});
  g.add_alternative(space, {one_of(" ")});
  g.add_alternative(space, {one_of("\n"), call(blanks)});
}

void JsonRules::add_text() {
  Grammar::Element plain = between(0x20, 0x7f);
  plain.bytes.reset('"');
  plain.bytes.reset('\\');
  const Grammar::Element tail = between(0x80, 0xbf), digit = one_of("0123456789abcdefABCDEF");
  character = g.rule({plain});
  for (const Alternative& bytes : std::initializer_list<Alternative>{
           {between(0xc2, 0xdf), tail},
           {between(0xe0, 0xe0), between(0xa0, 0xbf), tail},
           {between(0xe1, 0xec), tail, tail},
           {between(0xed, 0xed), between(0x80, 0x9f), tail},
           {between(0xee, 0xef), tail, tail},
           {between(0xf0, 0xf0), between(0x90, 0xbf), tail, tail},
           {between(0xf1, 0xf3), tail, tail, tail},
           {between(0xf4, 0xf4), between(0x80, 0x8f), tail, tail},
           {one_of("\\"), one_of("\"\\/bfnrt")},
           // No surrogates, which would have to come in pairs.
           {one_of("\\"), one_of("u"), one_of("0123456789abcefABCEF"), digit, digit, digit}}) {
    g.add_alternative(character, bytes);
  }
  const int32_t rest = g.add_rule();
  g.add_alternative(rest, {one_of("\"")});
  g.add_alternative(rest, {call(character), call(rest)});
  text = g.rule({one_of("\""), call(rest)});
}

void JsonRules::add_numbers() {
  const Grammar::Element digit = one_of("0123456789");
  const int32_t digits = g.rule({});
  g.add_alternative(digits, {digit, call(digits)});
  const int32_t natural = g.rule({one_of("0")});
  g.add_alternative(natural, {one_of("123456789"), call(digits)});
  integer = g.rule({call(natural)});
  g.add_alternative(integer, {one_of("-"), call(natural)});
  const int32_t fraction = g.rule({});
  g.add_alternative(fraction, {one_of("."), digit, call(digits)});
  const int32_t exponent = g.rule({});
  for (const Alternative& sign : {Alternative{}, Alternative{one_of("+-")}})
    g.add_alternative(exponent, Alternative{one_of("eE")} + sign + Alternative{digit});
  number = g.rule({call(integer), call(fraction), call(exponent)});
}

}  // namespace replayssm::server
