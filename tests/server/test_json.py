"""Answers that are held to JSON and to schemas, and prompts whose beginnings are known."""

import json
import time
import unittest

import jsonschema_rs
import openai

import load
from harness import MODEL, Server

SCHEMA = {
    "type": "object",
    "properties": {
        "name": {"type": "string", "maxLength": 12},
        "size": {"type": "integer"},
        "kind": {"enum": ["list", "stack", None]},
        "items": {"type": "array", "maxItems": 3, "items": {"type": "boolean"}},
    },
    "required": ["name", "kind", "items"],
    "additionalProperties": False,
}


class JsonAnswers(unittest.TestCase):
    @classmethod
    def setUpClass(cls):
        cls.server = Server()
        cls.client = openai.OpenAI(base_url=cls.server.url + "/v1", api_key="-", max_retries=0)

    @classmethod
    def tearDownClass(cls):
        cls.server.__exit__()

    def test_schema(self):
        whole = 0
        for temperature in (0, 1):
            answer = self.client.chat.completions.create(
                model=MODEL, n=4, temperature=temperature, seed=3, max_tokens=120,
                messages=[{"role": "user", "content": "a stack"}],
                response_format={"type": "json_schema",
                                 "json_schema": {"name": "thing", "schema": SCHEMA}},
            )
            for choice in answer.choices:
                if choice.finish_reason == "length":
                    continue
                whole += 1
                jsonschema_rs.validate(SCHEMA, json.loads(choice.message.content))
        self.assertGreater(whole, 3)

    def test_any_object(self):
        ends = ['"', "}", "]", ":"]  # likelier, so that objects do not go on for ever
        bias = {str(self.server.post("/tokenize", {"prompt": end})[2]["tokens"][0]): 5 for end in ends}
        answer = self.client.chat.completions.create(
            model=MODEL, n=12, temperature=1, seed=1, max_tokens=150,
            logit_bias=bias, messages=[{"role": "user", "content": "x"}],
            response_format={"type": "json_object"},
        )
        members = 0
        for choice in answer.choices:
            text = choice.message.content
            self.assertTrue(text.startswith("{"))
            if choice.finish_reason == "stop":
                members += len(json.loads(text))
        self.assertGreater(members, 2)

    def test_a_format_is_for_answers_that_call_nothing(self):
        schema = {"type": "object", "required": ["ok"], "properties": {"ok": {"type": "boolean"}},
                  "additionalProperties": False}
        arguments = {"type": "object", "required": ["n"], "properties": {"n": {"enum": [1, 2]}},
                     "additionalProperties": False}
        tools = [{"type": "function", "function": {"name": "f", "parameters": arguments}}]
        call, answer = "<tool_call>", "{"
        for choice, likely, calls in (("auto", call, True), ("auto", answer, False),
                                      (openai.NOT_GIVEN, call, True), ("none", call, False),
                                      ("required", answer, True)):
            first = self.server.post("/tokenize", {"prompt": likely})[2]["tokens"][0]
            chosen = self.client.chat.completions.create(
                model=MODEL, temperature=1, seed=1, max_tokens=200, logit_bias={str(first): 100},
                messages=[{"role": "user", "content": "x"}], tools=tools, tool_choice=choice,
                parallel_tool_calls=False,
                response_format={"type": "json_schema",
                                 "json_schema": {"name": "answer", "schema": schema}},
            ).choices[0]
            if calls:
                self.assertEqual(chosen.finish_reason, "tool_calls")
                self.assertIsNone(chosen.message.content)
                for each in chosen.message.tool_calls:
                    jsonschema_rs.validate(arguments, json.loads(each.function.arguments))
            else:
                self.assertEqual((chosen.finish_reason, chosen.message.tool_calls), ("stop", None))
                jsonschema_rs.validate(schema, json.loads(chosen.message.content))

    def test_schemas_that_are_refused(self):
        for schema, message in (({"type": "string", "pattern": "a"}, "pattern"), (5, "schema")):
            with self.assertRaisesRegex(openai.BadRequestError, message):
                self.client.completions.create(
                    model=MODEL, prompt="x",
                    extra_body={"response_format": {"type": "json_schema",
                                                    "json_schema": {"schema": schema}}},
                )


class Prefixes(unittest.TestCase):
    def test_a_known_beginning_answers_at_once(self):
        prompt = [300 + (i * i) % 1000 for i in range(3000)]
        ask = lambda server, own: server.complete(prompt + own, max_tokens=1, logprobs=0)

        def timed(server, own):
            began = time.time()
            answer = ask(server, own)
            return time.time() - began, answer

        with Server("--no-enable-prefix-caching") as plain, Server() as cached:
            cold, _ = timed(cached, [1, 7])
            ask(cached, [2, 7])  # leaves a state where the two part
            times = []
            for i in range(3, 7):
                seconds, answer = timed(cached, [i, 7])
                times.append(seconds)
                details = answer["usage"]["prompt_tokens_details"]
                self.assertEqual(details["cached_tokens"], 2944)
            self.assertEqual(answer["choices"], ask(plain, [6, 7])["choices"])
            print(f"cold {cold * 1e3:.1f} ms, known {min(times) * 1e3:.1f} ms")
            self.assertGreater(cold, 10 * min(times))


class ShortLoad(unittest.TestCase):
    def test_every_answer_is_that_of_the_request_alone(self):
        counts = load.run(requests=240, seconds=0, model=MODEL, distinct=24)
        self.assertGreater(counts["preemptions"], 0)
        self.assertGreater(counts["cached_tokens"], 0)


if __name__ == "__main__":
    unittest.main()
