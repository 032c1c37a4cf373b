"""Requests made from the OpenAPI file, right and wrong ones: none may be answered with a 500."""

import unittest

import schemathesis
from hypothesis import HealthCheck, settings
from schemathesis.checks import CHECKS

from harness import Server

# What a generated body may not do: keep the server busy for long.
LIMITS = {"max_tokens": 4, "max_completion_tokens": 4, "n": 2, "best_of": 2}
WANTED = ("not_a_server_error", "status_code_conformance", "content_type_conformance",
          "response_schema_conformance")


class Schema(unittest.TestCase):
    def test_every_operation(self):
        with Server("--max-model-len", "256") as server:
            schema = schemathesis.openapi.from_url(server.url + "/openapi.json")
            checks = CHECKS.get_by_names(WANTED)
            operations = 0
            for result in schema.get_all_operations():
                operations += 1
                self.check(result.ok(), checks, server)
            self.assertEqual(operations, 11)
            server.wait_idle()

    def check(self, operation, checks, server):
        from hypothesis import given

        @settings(max_examples=15, deadline=None, derandomize=True, database=None,
                  suppress_health_check=list(HealthCheck))
        @given(case=operation.as_strategy())
        def test(case):
            body = case.body
            if isinstance(body, dict):
                for name, most in LIMITS.items():
                    value = body.get(name)
                    if isinstance(value, (int, float)) and value > most:
                        body[name] = most
                if "prompt" in body or "messages" in body:
                    body.setdefault("max_tokens", 4)
            response = case.call(base_url=server.url)
            self.assertLess(response.status_code, 500, (case.body, response.text))
            if response.headers.get("Content-Type", [""])[0].startswith("text/event-stream"):
                return
            case.validate_response(response, checks=checks)

        with self.subTest(operation.label):
            test()


if __name__ == "__main__":
    unittest.main()
