"""Starts the program under test as a server, and small HTTP clients for it."""

import json
import os
import signal
import socket
import subprocess
import sys
import threading
import time
import urllib.error
import urllib.request

PROGRAM = os.environ.get("REPLAYSSM_PROGRAM", "build/release/replayssm")
MODEL = "tiny-qwen3.5"


class Server:
    """A running `replayssm serve`; kill() and terminate() end it early."""

    patience = 60  # seconds for an answer

    def __init__(self, *flags, model=MODEL, port=0):
        command = [PROGRAM, "serve", model, "--port", str(port), *flags]
        self.process = subprocess.Popen(
            command,
            stderr=subprocess.PIPE,
            text=True,
            env={**os.environ, "CUDA_VISIBLE_DEVICES": ""},
        )
        self.log = []
        for line in self.process.stderr:
            self.log.append(line)
            if " url=http://" in line:
                self.port = int(line.rsplit(":", 1)[1].strip().strip("/"))
                break
        else:
            raise RuntimeError("the server did not start: " + "".join(self.log))
        self.url = f"http://127.0.0.1:{self.port}"
        # A pipe that nobody empties would stop the server.
        self.reader = threading.Thread(target=self.collect_log, daemon=True)
        self.reader.start()

    def __enter__(self):
        return self

    def __exit__(self, *_):
        if self.process.poll() is None:
            self.process.send_signal(signal.SIGTERM)
        code = self.wait()
        if sys.exc_info()[0] is None and code not in (0, -signal.SIGKILL):
            raise RuntimeError(f"the server ended with {code}: " + self.read_log()[-2000:])

    def wait(self, seconds=40):
        deadline = time.time() + seconds
        while self.process.poll() is None:
            if time.time() > deadline:
                self.process.kill()
                raise RuntimeError("the server did not end")
            time.sleep(0.01)
        self.reader.join()
        self.process.stderr.close()
        return self.process.returncode

    def collect_log(self):
        for line in self.process.stderr:
            self.log.append(line)

    def read_log(self):
        return "".join(self.log)

    def get(self, path, headers=None):
        return self.ask("GET", path, None, headers)

    def post(self, path, body, headers=None):
        return self.ask("POST", path, body, headers)

    def ask(self, method, path, body=None, headers=None):
        """(status, headers, body): JSON decoded where it is JSON."""
        data = None
        sent = dict(headers or {})
        if body is not None:
            data = body if isinstance(body, bytes) else json.dumps(body).encode()
            sent.setdefault("Content-Type", "application/json")
        request = urllib.request.Request(self.url + path, data, sent, method=method)
        try:
            with urllib.request.urlopen(request, timeout=self.patience) as answer:
                status, received, text = answer.status, answer.headers, answer.read()
        except urllib.error.HTTPError as error:
            status, received, text = error.code, error.headers, error.read()
        if received.get("Content-Type", "").startswith("application/json") and text:
            text = json.loads(text)
        return status, received, text

    def complete(self, prompt, **fields):
        """A greedy completion's JSON."""
        body = {"prompt": prompt, "temperature": 0, "ignore_eos": True, **fields}
        status, _, answer = self.post("/v1/completions", body)
        assert status == 200, answer
        return answer

    def text(self, prompt, **fields):
        return self.complete(prompt, **fields)["choices"][0]["text"]

    def metrics(self):
        lines = self.get("/metrics")[2].decode().splitlines()
        pairs = (line.rsplit(" ", 1) for line in lines if not line.startswith("#"))
        return {name: float(value) for name, value in pairs}

    def metric(self, name):
        return self.metrics()[name]

    def wait_for(self, condition):
        deadline = time.time() + self.patience / 4
        while not condition():
            if time.time() > deadline:
                raise AssertionError("timed out waiting")
            time.sleep(0.02)

    def wait_idle(self):
        self.wait_for(
            lambda: self.metric("replayssm_requests_running")
            + self.metric("replayssm_requests_waiting")
            == 0
        )

    def wait_empty(self, descriptors):
        """Until nothing is held. Requests of clients that have gone may still be on their way."""

        def empty():
            values = self.metrics()
            running = values["replayssm_requests_running"] + values["replayssm_requests_waiting"]
            unused = values['replayssm_kv_blocks{state="free"}'] + values["replayssm_prefix_blocks"]
            everything = values['replayssm_kv_blocks{state="all"}']
            return running == 0 and unused == everything and self.descriptors() <= descriptors

        self.wait_for(empty)

    def descriptors(self):
        return len(os.listdir(f"/proc/{self.process.pid}/fd"))

    def resident_bytes(self):
        with open(f"/proc/{self.process.pid}/statm", encoding="ascii") as file:
            return int(file.read().split()[1]) * os.sysconf("SC_PAGE_SIZE")

    def socket(self):
        return socket.create_connection(("127.0.0.1", self.port), timeout=self.patience)


def raw_post(path, body, *headers, length=None):
    """The bytes of a POST request."""
    length = len(body) if length is None else length
    head = [f"POST {path} HTTP/1.1", "Host: test", "Content-Type: application/json"]
    head += [f"Content-Length: {length}", *headers]
    return "\r\n".join(head).encode() + b"\r\n\r\n" + body


def read_answer(connection):
    """(status, body) of a raw connection's next answer with a Content-Length; (0, b"") at its end."""
    data = b""
    while b"\r\n\r\n" not in data:
        piece = connection.recv(65536)
        if not piece:
            return 0, data
        data += piece
    head, _, body = data.partition(b"\r\n\r\n")
    lines = head.decode().split("\r\n")
    fields = dict(line.split(": ", 1) for line in lines[1:])
    while len(body) < int(fields.get("Content-Length", 0)):
        body += connection.recv(65536)
    return int(lines[0].split()[1]), body
