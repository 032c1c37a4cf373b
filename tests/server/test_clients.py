"""Clients that behave badly: the others must not notice, and nothing may be left behind."""

import json
import os
import select
import signal
import socket
import struct
import threading
import time
import unittest

from harness import Server, raw_post, read_answer

PROMPT = "class Stack:"
BODY = {"prompt": PROMPT, "max_tokens": 8, "temperature": 0, "ignore_eos": True}
LONG = {**BODY, "max_tokens": 3000, "stream": True}


def reset(connection):
    """Ends a connection without a farewell."""
    connection.setsockopt(socket.SOL_SOCKET, socket.SO_LINGER, struct.pack("ii", 1, 0))
    connection.close()


class Clients(unittest.TestCase):
    def setUp(self):
        self.server = Server("--max-body-mib", "1")
        self.text = self.server.text(PROMPT, max_tokens=8)

    def tearDown(self):
        self.server.__exit__()

    def expect_well(self, seconds=2):
        started = time.time()
        self.assertEqual(self.server.text(PROMPT, max_tokens=8), self.text)
        self.assertLess(time.time() - started, seconds)

    def expect_many_well(self, count):
        texts = [None] * count

        def ask(i):
            _, _, answer = self.server.post("/v1/completions", {**BODY, "stream": True})
            events = [line[6:] for line in answer.decode().split("\n\n") if line]
            self.assertEqual(events.pop(), "[DONE]")
            texts[i] = "".join(json.loads(event)["choices"][0]["text"] for event in events)

        threads = [threading.Thread(target=ask, args=(i,)) for i in range(count)]
        for thread in threads:
            thread.start()
        for thread in threads:
            thread.join()
        self.assertEqual(texts, [self.text] * count)

    def test_who_goes_away_is_cancelled(self):
        before = self.server.descriptors()
        for end in (lambda c: c.close(), reset, lambda c: c.shutdown(socket.SHUT_WR)):
            for stream in (True, False):
                connection = self.server.socket()
                connection.sendall(
                    raw_post("/v1/completions", json.dumps({**LONG, "stream": stream}).encode())
                )
                self.server.wait_for(lambda: self.server.metric("replayssm_requests_running") == 1)
                end(connection)
                self.server.wait_idle()
                connection.close()
        self.expect_well()
        self.server.wait_empty(before)
        self.server.wait_for(lambda: "status=499" in self.server.read_log())

    def test_half_requests_and_idle_connections(self):
        before = self.server.descriptors()
        connections = [self.server.socket() for _ in range(1000)]
        whole = raw_post("/v1/completions", json.dumps(BODY).encode())
        for i, connection in enumerate(connections[:300]):
            connection.sendall(whole[: 1 + i % (len(whole) - 1)])
        self.expect_well()
        last = connections[299]
        last.sendall(whole[1 + 299 % (len(whole) - 1):])
        status, body = read_answer(last)
        self.assertEqual((status, json.loads(body)["choices"][0]["text"]), (200, self.text))
        for connection in connections:
            connection.close()
        self.server.wait_empty(before)

    def test_bodies_that_are_too_large(self):
        for announce in (True, False):
            connection = self.server.socket()
            head = raw_post("/v1/completions", b"", length=100 << 20)
            if not announce:
                head = head.replace(b"Content-Length: 104857600", b"Transfer-Encoding: chunked")
            connection.sendall(head)
            try:
                for _ in range(100):
                    piece = b" " * (1 << 20)
                    connection.sendall(piece if announce else b"100000\r\n" + piece + b"\r\n")
            except (BrokenPipeError, ConnectionResetError):
                pass
            status, body = read_answer(connection)
            self.assertEqual(status, 413, body)
            self.assertIn("at most 1048576 bytes", json.loads(body)["error"]["message"])
            connection.close()
            self.expect_well()
        self.assertLess(self.server.resident_bytes(), 600 << 20)

    def test_what_is_no_http(self):
        for text in (b"\x16\x03\x01\x02\x00\x01", b"GET / HTTP/9.9\r\n\r\n", b"hello\r\n\r\n",
                     b"POST / HTTP/1.1\r\nContent-Length: -5\r\n\r\n",
                     b"GET / HTTP/1.1\r\nA: " + b"x" * 40000 + b"\r\n\r\n"):
            with self.server.socket() as connection:
                connection.sendall(text)
                self.assertIn(read_answer(connection)[0], (400, 431), text[:40])
        self.expect_well()

    def test_requests_one_behind_another(self):
        whole = raw_post("/v1/completions", json.dumps(BODY).encode())
        with self.server.socket() as connection:
            connection.sendall(whole * 3)
            data = b""
            while data.count(b"HTTP/1.1 200") < 3 or not data.endswith(b"}"):
                data += connection.recv(65536)
        with self.server.socket() as connection:
            connection.sendall(whole.replace(b"HTTP/1.1", b"HTTP/1.0"))
            self.assertEqual(read_answer(connection)[0], 200)
            self.assertEqual(connection.recv(1), b"")

    def test_slow_readers(self):
        connections = []
        for _ in range(4):
            connection = socket.socket()
            connection.setsockopt(socket.SOL_SOCKET, socket.SO_RCVBUF, 4096)
            connection.connect(("127.0.0.1", self.server.port))
            connection.sendall(raw_post("/v1/completions", json.dumps(LONG).encode()))
            connections.append(connection)
        self.server.wait_for(lambda: self.server.metric("replayssm_requests_running") == 4)
        self.expect_well(5)
        self.expect_many_well(32)
        for connection in connections:
            connection.close()
        self.server.wait_idle()

    def test_huge_texts_hold_up_nobody(self):
        long = {**BODY, "user": "y" * 20_000, "response_format": {"type": "json_object"}}
        with Server() as server:
            self.assertEqual(server.post("/v1/completions", long)[0], 200)  # makes what is kept
            huge = server.socket()
            huge.sendall(raw_post("/tokenize", json.dumps({"prompt": "7" * 8_000_000}).encode()))
            time.sleep(0.3)  # until all of it is there
            for body in (BODY, long):
                self.assertEqual(server.post("/v1/completions", body)[0], 200)
            self.assertEqual(select.select([huge], [], [], 0)[0], [])
            self.assertEqual(read_answer(huge)[0], 200)
            huge.close()

    def test_many_at_once(self):
        self.expect_many_well(64)


class Ends(unittest.TestCase):
    """How a server ends."""

    def begin(self, server, tokens):
        connection = server.socket()
        body = json.dumps({**LONG, "max_tokens": tokens}).encode()
        connection.sendall(raw_post("/v1/completions", body))
        server.wait_for(lambda: server.metric("replayssm_requests_running") >= 1)
        return connection

    def rest(self, connection):
        data = b""
        while piece := connection.recv(65536):
            data += piece
        return data

    def test_drains(self):
        server = Server()
        connection = self.begin(server, 200)
        idle = server.socket()
        server.process.send_signal(signal.SIGTERM)
        self.assertTrue(self.rest(connection).endswith(b"data: [DONE]\n\n\r\n0\r\n\r\n"))
        self.assertEqual(server.wait(), 0)
        self.assertEqual(idle.recv(1), b"")
        with self.assertRaises(ConnectionRefusedError):
            server.socket()

    def test_does_not_wait_for_ever(self):
        server = Server("--drain-timeout", "0.3")
        connection = self.begin(server, 4000)
        server.process.send_signal(signal.SIGTERM)
        self.assertIn(b"the server is going down", self.rest(connection))
        self.assertEqual(server.wait(5), 0)

    def test_requests_time_out(self):
        with Server("--request-timeout", "0.3") as server:
            self.assertIn(b"took more than 0.3 seconds", self.rest_of_long(server))
            status, _, answer = server.post("/v1/completions", {**LONG, "stream": False})
            self.assertEqual((status, "took more" in answer["error"]["message"]), (504, True))
            server.wait_idle()

    def rest_of_long(self, server):
        connection = self.begin(server, 4000)
        data = b""
        while not data.endswith(b"0\r\n\r\n"):
            data += connection.recv(65536)
        connection.close()
        return data

    def test_starts_again_at_once_after_being_killed(self):
        first = Server()
        connection = self.begin(first, 1000)
        first.process.kill()
        first.wait()
        connection.close()
        with Server(port=first.port) as second:
            self.assertEqual(second.port, first.port)
            self.assertEqual(len(second.complete(PROMPT, max_tokens=4)["choices"]), 1)

    def test_refuses_more_than_it_can_queue(self):
        with Server("--max-waiting", "2", "--max-num-seqs", "1") as server:
            held = [self.begin(server, 3000) for _ in range(2)]
            server.wait_for(lambda: server.metric("replayssm_requests_waiting") == 1)
            status, headers, answer = server.post("/v1/completions", BODY)
            self.assertEqual((status, answer["error"]["code"]), (503, "overloaded"))
            self.assertEqual(headers["Retry-After"], "1")
            for connection in held:
                connection.close()
            server.wait_idle()
            self.assertEqual(server.post("/v1/completions", BODY)[0], 200)

    def test_refuses_what_was_prepared_too_late(self):
        """Long bodies wait for their turn; then there may be no room any more."""
        with Server("--max-waiting", "2") as server:
            slow = server.socket()
            slow.sendall(raw_post("/tokenize", json.dumps({"prompt": "a b " * 1_000_000}).encode()))
            body = json.dumps({**BODY, "max_tokens": 400, "user": "y" * 1_100_000}).encode()
            connections = [server.socket() for _ in range(6)]
            for connection in connections:
                connection.sendall(raw_post("/v1/completions", body))
            answers = sorted(read_answer(connection)[0] for connection in connections)
            self.assertEqual(answers, [200] * 2 + [503] * 4)
            self.assertEqual(read_answer(slow)[0], 200)
            for connection in [slow, *connections]:
                connection.close()


if __name__ == "__main__":
    unittest.main()
