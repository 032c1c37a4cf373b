"""Load on a whole server: load.py PROGRAM [--requests N] [--seconds S] [--distinct N] [--model NAME]
[--flags="FURTHER FLAGS OF THE SERVER"].

Random prompts with shared beginnings, streams, stop strings, priorities, cancellations and
disconnects, over caches too small for them. Every answer must be that of the same request alone;
nothing may be left behind, and memory must stay flat. With --seconds it goes on for that long.
"""

import argparse
import json
import os
import random
import threading
import time

FLAGS = ("--dtype", "float32", "--max-num-seqs", "6", "--max-num-batched-tokens", "256",
         "--num-kv-blocks", "18", "--max-model-len", "512", "--prefix-interval", "64",
         "--prefix-cache-gib", "0.05", "--swap-gib", "0.02")
WORDS = "def class return self value list index for while import None True print add stack".split()


def make_requests(count, seed):
    """Distinct requests; load is drawn from them, so that each is computed alone only once."""
    draw = random.Random(seed)
    families = [" ".join(draw.choices(WORDS, k=90)) for _ in range(3)]
    requests = []
    for _ in range(count):
        prompt = draw.choice(families)[: draw.choice((0, 150, 300, 500))]
        prompt += " " + " ".join(draw.choices(WORDS, k=draw.randint(1, 30)))
        requests.append({"prompt": prompt, "max_tokens": draw.randint(1, 48)})
    return requests


class Load:
    def __init__(self, server, requests, seed):
        self.server, self.requests, self.seed = server, requests, seed
        self.expected = [server.text(**request) for request in requests]
        self.answers = self.gone = self.differing = 0
        self.lock = threading.Lock()

    def ask(self, draw):
        from harness import raw_post

        which = draw.randrange(len(self.requests))
        body = {**self.requests[which], "temperature": 0, "ignore_eos": True,
                "stream": draw.random() < 0.5, "priority": draw.randint(0, 2)}
        expected = self.expected[which]
        if draw.random() < 0.3 and len(expected) > 8:
            at = draw.randrange(2, len(expected) - 3)
            body["stop"] = expected[at : at + 3]
            expected = expected[: expected.index(body["stop"])]
        if draw.random() < 0.2:
            connection = self.server.socket()
            connection.sendall(raw_post("/v1/completions", json.dumps(body).encode()))
            if draw.random() < 0.5:
                connection.recv(100)
            connection.close()
            with self.lock:
                self.gone += 1
            return
        status, _, answer = self.server.post("/v1/completions", body)
        assert status == 200, answer
        if body["stream"]:
            events = [line[6:] for line in answer.decode().split("\n\n") if line]
            assert events.pop() == "[DONE]", answer
            text = "".join(json.loads(event)["choices"][0]["text"] for event in events)
        else:
            text = answer["choices"][0]["text"]
        with self.lock:
            self.answers += 1
            if text != expected:
                self.differing += 1
                print("differs:", body, "\n got", repr(text), "\nwant", repr(expected), flush=True)

    def run(self, count, clients, deadline=None):
        failures = []

        def client(number):
            draw = random.Random(f"{self.seed} {number} {self.answers}")
            try:
                for _ in range(count // clients):
                    if deadline and time.time() > deadline:
                        return
                    self.ask(draw)
            except Exception as error:  # pylint: disable=broad-except
                failures.append(error)

        threads = [threading.Thread(target=client, args=(i,)) for i in range(clients)]
        for thread in threads:
            thread.start()
        for thread in threads:
            thread.join()
        if failures:
            raise failures[0]


def check_empty(server, descriptors):
    server.wait_idle()
    server.wait_for(lambda: server.descriptors() <= descriptors)
    kept = server.metric("replayssm_prefix_blocks")
    free = server.metric('replayssm_kv_blocks{state="free"}')
    assert free + kept == server.metric('replayssm_kv_blocks{state="all"}'), (free, kept)


def run(requests, seconds, model, clients=12, distinct=60, seed=1, flags=()):
    from harness import Server

    with Server(*FLAGS, *flags, model=model) as server:
        load = Load(server, make_requests(distinct, seed), seed)
        descriptors = server.descriptors()
        load.run(min(requests, 500), clients)  # what grows once has grown
        check_empty(server, descriptors + 1)
        before, began = server.resident_bytes(), time.time()
        deadline = began + seconds if seconds else None
        while load.answers + load.gone < requests or (deadline and time.time() < deadline):
            load.run(min(600, requests), clients, deadline)
            check_empty(server, descriptors + 1)
            if not deadline and time.time() - began > 3000:
                raise TimeoutError("50 minutes")
        grown = server.resident_bytes() - before
        counts = {name: int(server.metric(f"replayssm_{name}_total"))
                  for name in ("preemptions", "swaps", "cached_tokens", "folds")}
    print(f"{load.answers} answers, {load.differing} differing, {load.gone} clients gone, "
          f"memory grew by {grown / 2**20:.1f} MiB in {time.time() - began:.0f} s, {counts}")
    assert load.differing == 0
    assert grown < 64 << 20, grown
    return counts


if __name__ == "__main__":
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("program")
    parser.add_argument("--flags", default="", help="further ones of the server")
    parser.add_argument("--requests", type=int, default=10000)
    parser.add_argument("--seconds", type=float, default=0)
    parser.add_argument("--distinct", type=int, default=60, help="requests that load is drawn from")
    parser.add_argument("--model", default="tiny-qwen3.5")
    arguments = parser.parse_args()
    os.environ["REPLAYSSM_PROGRAM"] = os.path.abspath(arguments.program)
    run(arguments.requests, arguments.seconds, arguments.model, distinct=arguments.distinct,
        flags=arguments.flags.split())
