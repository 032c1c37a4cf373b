"""The API as clients use it: the openai package, curl and plain HTTP."""

import json
import subprocess
import unittest

import jsonschema_rs
import openai

from harness import MODEL, Server

PROMPT = "def add(a, b):"


class Api(unittest.TestCase):
    @classmethod
    def setUpClass(cls):
        cls.server = Server("--api-key", "secret", "--api-key", "other", "--allowed-origin", "http://a.test")
        cls.key = {"Authorization": "Bearer secret"}
        cls.client = openai.OpenAI(base_url=cls.server.url + "/v1", api_key="secret", max_retries=0)
        cls.greedy = {"model": MODEL, "temperature": 0, "max_tokens": 12}

    @classmethod
    def tearDownClass(cls):
        cls.server.__exit__()

    def expect_error(self, status, message, path, body, param=None):
        got, _, answer = self.server.post(path, body, self.key)
        self.assertEqual(got, status, answer)
        self.assertIn(message, answer["error"]["message"])
        self.assertEqual(set(answer["error"]), {"message", "type", "param", "code"})
        if param:
            self.assertEqual(answer["error"]["param"], param)

    def test_completion(self):
        whole = self.client.completions.create(prompt=PROMPT, **self.greedy)
        self.assertEqual(whole.choices[0].finish_reason, "length")
        self.assertEqual(whole.usage.completion_tokens, 12)
        self.assertEqual(whole.usage.total_tokens, whole.usage.prompt_tokens + 12)
        chunks = list(
            self.client.completions.create(
                prompt=PROMPT, stream=True, stream_options={"include_usage": True}, **self.greedy
            )
        )
        text = "".join(c.choices[0].text for c in chunks if c.choices)
        self.assertEqual(text, whole.choices[0].text)
        self.assertEqual(chunks[-1].usage.completion_tokens, 12)
        self.assertEqual([c.choices[0].finish_reason for c in chunks[-2:-1]], ["length"])

    def test_prompts_of_every_kind(self):
        ids = self.server.post("/tokenize", {"prompt": PROMPT}, self.key)[2]["tokens"]
        text = self.client.completions.create(prompt=PROMPT, **self.greedy).choices[0].text
        for prompt in (ids, [PROMPT], [ids], [PROMPT, PROMPT]):
            choices = self.client.completions.create(prompt=prompt, **self.greedy).choices
            self.assertEqual([c.text for c in choices], [text] * len(choices))
            self.assertEqual([c.index for c in choices], list(range(len(choices))))
        self.assertEqual(
            self.server.post("/detokenize", {"tokens": ids}, self.key)[2]["prompt"], PROMPT
        )
        echoed = self.client.completions.create(prompt=PROMPT, echo=True, **self.greedy)
        self.assertEqual(echoed.choices[0].text, PROMPT + text)

    def test_answers_of_many_megabytes(self):
        text = "a b c " * 500_000
        status, _, answer = self.server.post("/tokenize", {"prompt": text}, self.key)
        self.assertEqual((status, len(answer["tokens"])), (200, answer["count"]))
        self.assertGreater(answer["count"], 1_000_000)

    def test_arguments_that_are_nested_deep(self):
        deep = '{"a":' * 50_000 + "1" + "}" * 50_000
        call = {"id": "1", "type": "function", "function": {"name": "f", "arguments": deep}}
        status, _, answer = self.server.post(
            "/tokenize",
            {"messages": [{"role": "user", "content": "x"}, {"role": "assistant", "tool_calls": [call]}]},
            self.key,
        )
        self.assertEqual(status, 200, answer)

    def test_chat(self):
        messages = [
            {"role": "system", "content": "You write Python."},
            {"role": "user", "content": [{"type": "text", "text": "def "}, {"type": "text", "text": "f"}]},
        ]
        whole = self.client.chat.completions.create(messages=messages, **self.greedy)
        self.assertEqual(whole.choices[0].message.role, "assistant")
        stream = self.client.chat.completions.create(messages=messages, stream=True, **self.greedy)
        deltas = [chunk.choices[0].delta for chunk in stream]
        self.assertEqual(deltas[0].role, "assistant")
        self.assertEqual(
            "".join(d.content or "" for d in deltas), whole.choices[0].message.content
        )
        ids = self.server.post("/tokenize", {"messages": messages}, self.key)[2]["tokens"]
        self.assertEqual(len(ids), whole.usage.prompt_tokens)

    def test_choices_are_drawn_apart_and_seeds_repeat(self):
        fields = {"model": MODEL, "max_tokens": 12, "temperature": 1, "seed": 7}
        draw = lambda **more: [
            c.text for c in self.client.completions.create(prompt=PROMPT, **fields, **more).choices
        ]
        four = draw(n=4)
        self.assertGreater(len(set(four)), 1)
        self.assertEqual(four, draw(n=4))
        best = draw(n=1, best_of=4)
        self.assertIn(best[0], four)

    def test_logprobs(self):
        one = self.client.completions.create(prompt=PROMPT, logprobs=3, **self.greedy).choices[0]
        self.assertEqual("".join(one.logprobs.tokens), one.text)
        self.assertEqual(len(one.logprobs.token_logprobs), 12)
        for token, logprob, top in zip(
            one.logprobs.tokens, one.logprobs.token_logprobs, one.logprobs.top_logprobs
        ):
            self.assertEqual(max(top, key=top.get), token)
            self.assertEqual(top[token], logprob)
        chat = self.client.chat.completions.create(
            messages=[{"role": "user", "content": "x"}], logprobs=True, top_logprobs=2, **self.greedy
        ).choices[0]
        self.assertEqual(len(chat.logprobs.content), 12)
        text = b"".join(bytes(t.bytes) for t in chat.logprobs.content)
        self.assertEqual(text.decode(), chat.message.content)

    def test_stop_and_bias(self):
        text = self.client.completions.create(prompt=PROMPT, **self.greedy).choices[0].text
        stop = text[4:7]
        cut = self.client.completions.create(prompt=PROMPT, stop=[stop], **self.greedy).choices[0]
        self.assertEqual(cut.text, text[: text.index(stop)])
        self.assertEqual(cut.finish_reason, "stop")
        first = self.server.post("/tokenize", {"prompt": text}, self.key)[2]["tokens"][0]
        other = self.client.completions.create(
            prompt=PROMPT, logit_bias={str(first): -100}, **self.greedy
        )
        self.assertNotEqual(other.choices[0].text, text)
        only = self.client.completions.create(prompt=PROMPT, logit_bias={"40": 100}, **self.greedy)
        self.assertEqual(only.choices[0].text, only.choices[0].text[0] * 12)

    def test_tools_are_accepted(self):
        tools = [{"type": "function", "function": {"name": "f", "parameters": {"type": "object"}}}]
        messages = [
            {"role": "user", "content": "call f"},
            {
                "role": "assistant",
                "content": None,
                "tool_calls": [
                    {"id": "1", "type": "function", "function": {"name": "f", "arguments": "{}"}}
                ],
            },
            {"role": "tool", "tool_call_id": "1", "content": "done"},
        ]
        answer = self.client.chat.completions.create(messages=messages, tools=tools, **self.greedy)
        self.assertIn(answer.choices[0].finish_reason, ("length", "stop"))

    def test_tools_are_called_where_they_have_to_be(self):
        schema = {"type": "object", "required": ["city"], "additionalProperties": False, "properties": {
            "city": {"enum": ["Rome", "Oslo"]}, "exact": {"type": "boolean"},
            "days": {"type": "array", "items": {"enum": [1, 2, 3]}, "maxItems": 2, "minItems": 1}}}
        tools = [{"type": "function", "function": {"name": name, "parameters": schema}}
                 for name in ("weather", "tides")]
        fields = {"model": MODEL, "messages": [{"role": "user", "content": "Rome?"}], "tools": tools,
                  "max_tokens": 300, "temperature": 1}
        named = {"type": "function", "function": {"name": "tides"}}
        for seed in range(4):
            for choice in ("required", named):
                choice = {"tool_choice": choice, "parallel_tool_calls": False, "seed": seed}
                whole = self.client.chat.completions.create(**fields, **choice).choices[0]
                self.assertEqual((whole.finish_reason, whole.message.content), ("tool_calls", None))
                calls = [call.function for call in whole.message.tool_calls]
                self.assertEqual(len(calls), 1)
                self.assertIn(calls[0].name, ("weather", "tides")[choice["tool_choice"] == named:])
                jsonschema_rs.validate(schema, json.loads(calls[0].arguments))
                chunks = [chunk.choices[0] for chunk in
                          self.client.chat.completions.create(stream=True, **fields, **choice)]
                self.assertEqual(chunks[-1].finish_reason, "tool_calls")
                self.assertEqual("".join(chunk.delta.content or "" for chunk in chunks), "")
                streamed = [call.function for chunk in chunks for call in chunk.delta.tool_calls or []]
                self.assertEqual([(c.name, c.arguments) for c in streamed],
                                 [(c.name, c.arguments) for c in calls])
        for change, message in (
            ({"tool_choice": "must"}, "expected none, auto, required"),
            ({"tool_choice": {"type": "function"}}, "expected none, auto, required"),
            ({"tool_choice": {"function": {"name": "x"}}}, "the name of one of tools"),
            ({"tool_choice": "required", "tools": []}, "tools to choose from"),
            ({"tool_choice": "required", "tools": None}, "tools to choose from"),
        ):
            self.expect_error(400, message, "/v1/chat/completions", {**fields, **change}, "tool_choice")

    def test_errors(self):
        for change, message, param in (
            ({"prompt": 5}, "expected a text", "prompt"),
            ({"prompt": ""}, "at least one token", "prompt"),
            ({"prompt": [1, 99999]}, "expected token ids", "prompt"),
            ({"prompt": "a " * 5000}, "expected at most 4095", "prompt"),
            ({"temperature": 3}, "from 0 to 2, got 3", "temperature"),
            ({"temperature": "warm"}, "expected a number", "temperature"),
            ({"max_tokens": 0}, "whole number", "max_tokens"),
            ({"seed": 2**63}, "whole number", "seed"),
            ({"max_tokens": 1.5}, "whole number", "max_tokens"),
            ({"n": 1000}, "from 1 to 128", "n"),
            ({"best_of": 2, "n": 3}, "at least n", "best_of"),
            ({"stop": [1]}, "list of at most 16 texts", "stop"),
            ({"stop": "x" * 1025}, "at most 1024 bytes", "stop"),
            ({"stop": [""]}, "expected a text, got an empty one", "stop"),
            ({"logit_bias": {"x": 1}}, "expected token ids", "logit_bias"),
            ({"logprobs": 21}, "from 0 to 20", "logprobs"),
            ({"stream_options": {"include_usage": True}}, "only with stream", "stream_options"),
            ({"suffix": "x"}, "only write on", "suffix"),
        ):
            self.expect_error(400, message, "/v1/completions", {"prompt": "x", **change}, param)
        self.expect_error(404, "expected " + MODEL, "/v1/completions", {"model": "gpt", "prompt": "x"})
        for messages, message in (
            (None, "at least one message"),
            ([], "at least one message"),
            ([{"role": "user"}], "messages[0].content"),
            ([{"content": "x"}], "messages[0].role"),
            ([{"role": "user", "content": [{"type": "image_url"}]}], "parts of type text"),
        ):
            self.expect_error(400, message, "/v1/chat/completions", {"messages": messages})
        with self.assertRaises(openai.BadRequestError):
            self.client.completions.create(model=MODEL, prompt="x", temperature=5)
        with self.assertRaises(openai.NotFoundError):
            self.client.completions.create(model="other", prompt="x")

    def test_bodies_that_are_no_requests(self):
        for body, message in (
            (b"", "malformed at byte"),
            (b"{", "malformed at byte"),
            (b"[]", "expected a JSON object"),
            (b'{"prompt": "\xff\xfe"}', "malformed at byte"),
            (b"[" * 100000, "nested at most 64"),
            (b'{"a":' * 100000, "nested at most 64"),
            (b'{"prompt": NaN}', "malformed at byte"),
            (b'{"prompt": "x", "temperature": 1e400}', "range of a double"),
            (json.dumps({"prompt": "x", "logit_bias": dict.fromkeys(map(str, range(2000)), 0)}).encode(),
             "at most 1024 members"),
        ):
            self.expect_error(400, message, "/v1/completions", body)

    def test_keys(self):
        for headers in ({}, {"Authorization": "Bearer wrong"}, {"Authorization": "secret"}):
            status, received, answer = self.server.post("/v1/completions", {"prompt": "x"}, headers)
            self.assertEqual((status, answer["error"]["code"]), (401, "invalid_api_key"))
            self.assertEqual(received["WWW-Authenticate"], "Bearer")
        other = {"Authorization": "Bearer other"}
        self.assertEqual(self.server.get("/v1/models", other)[0], 200)
        self.assertEqual(self.server.get("/health")[0], 200)
        with self.assertRaises(openai.AuthenticationError):
            openai.OpenAI(base_url=self.server.url + "/v1", api_key="no").models.list()

    def test_places(self):
        models = self.client.models.list().data
        self.assertEqual([m.id for m in models], [MODEL])
        self.assertEqual(self.client.models.retrieve(MODEL).id, MODEL)
        self.assertRegex(self.server.get("/version")[2]["version"], r"^\d+\.\d+")
        self.assertEqual(self.server.get("/nothing")[0], 404)
        self.assertEqual(self.server.get("/v1/models/x", self.key)[0], 404)
        status, headers, _ = self.server.get("/v1/completions", self.key)
        self.assertEqual((status, headers["Allow"]), (405, "POST"))
        status, headers, _ = self.server.ask("HEAD", "/health")
        self.assertEqual((status, headers["Content-Length"]), (200, "18"))
        form = {"Content-Type": "application/x-www-form-urlencoded", **self.key}
        self.assertEqual(self.server.post("/v1/completions", {"prompt": "x"}, form)[0], 415)
        metrics = self.server.get("/metrics")[2].decode()
        for name in ("requests_running", "generation_tokens_total", "inter_token_seconds_bucket"):
            self.assertIn("replayssm_" + name, metrics)

    def test_other_origins(self):
        origin = {"Origin": "http://a.test", **self.key}
        _, headers, _ = self.server.get("/v1/models", origin)
        self.assertEqual(headers["Access-Control-Allow-Origin"], "http://a.test")
        status, headers, _ = self.server.ask("OPTIONS", "/v1/completions", None, origin)
        self.assertEqual((status, headers["Access-Control-Allow-Methods"]), (204, "GET, POST, OPTIONS"))
        _, headers, _ = self.server.get("/v1/models", {"Origin": "http://b.test", **self.key})
        self.assertNotIn("Access-Control-Allow-Origin", headers)

    def test_request_ids(self):
        _, headers, _ = self.server.get("/health", {"X-Request-Id": "mine-1"})
        self.assertEqual(headers["X-Request-Id"], "mine-1")
        _, headers, _ = self.server.get("/health", {"X-Request-Id": "a b\tc"})
        self.assertRegex(headers["X-Request-Id"], "^[0-9a-f]{24}$")
        self.server.wait_for(lambda: "request id=mine-1 " in self.server.read_log())

    def test_curl(self):
        command = ["curl", "-sS", "-N", self.server.url + "/v1/completions", "-H",
                   "Authorization: Bearer secret", "-H", "Content-Type: application/json"]
        body = json.dumps({"prompt": PROMPT, "stream": True, **self.greedy})
        lines = subprocess.run(
            [*command, "-d", body], capture_output=True, text=True, check=True
        ).stdout.strip().split("\n\n")
        self.assertEqual(lines[-1], "data: [DONE]")
        text = "".join(json.loads(line[6:])["choices"][0]["text"] for line in lines[:-1])
        self.assertEqual(
            text, self.client.completions.create(prompt=PROMPT, **self.greedy).choices[0].text
        )

    def test_routes(self):
        text = self.client.completions.create(prompt=PROMPT, **self.greedy).choices[0].text
        for route in ("conventional", "state_and_output", "output_only"):
            status, _, answer = self.server.post("/replayssm/route", {"route": route}, self.key)
            self.assertEqual((status, answer), (200, {"route": route}))
            self.assertEqual(
                self.client.completions.create(prompt=PROMPT, **self.greedy).choices[0].text, text
            )
            status = self.server.get("/replayssm/status", self.key)[2]
            self.assertEqual(status["route"], route)
            self.assertGreater(status["decode_step_seconds"][route], 0)
        self.expect_error(400, "expected conventional", "/replayssm/route", {"route": "x"}, "route")


if __name__ == "__main__":
    unittest.main()
