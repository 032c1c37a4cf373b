"""The page at /, in a real browser without a screen."""

import base64
import json
import os
import shutil
import subprocess
import tempfile
import time
import unittest
import urllib.request

from harness import Server


class Browser:
    """Chromium through its driver, by the WebDriver protocol."""

    def __init__(self):
        self.profile = tempfile.mkdtemp()
        self.driver = subprocess.Popen(
            ["chromedriver", "--port=0"], stdout=subprocess.PIPE, stderr=subprocess.DEVNULL, text=True
        )
        for line in self.driver.stdout:
            if "on port" in line and "successfully" in line:
                self.url = "http://127.0.0.1:" + line.rstrip(".\n").rsplit(" ", 1)[1]
                break
        flags = ["--headless=new", "--no-sandbox", "--disable-gpu", "--disable-dev-shm-usage",
                 "--window-size=1200,820", "--user-data-dir=" + self.profile]
        capabilities = {"alwaysMatch": {
            "goog:chromeOptions": {"args": flags, "binary": shutil.which("chromium")},
            "goog:loggingPrefs": {"browser": "ALL"}}}
        self.session = self.call("/session", {"capabilities": capabilities})["sessionId"]

    def call(self, path, body=None, method=None):
        data = None if body is None else json.dumps(body).encode()
        method = method or ("GET" if body is None else "POST")
        request = urllib.request.Request(
            self.url + path, data, {"Content-Type": "application/json"}, method=method
        )
        with urllib.request.urlopen(request, timeout=60) as answer:
            return json.load(answer)["value"]

    def command(self, path, body=None):
        return self.call(f"/session/{self.session}{path}", body)

    def run(self, script):
        return self.command("/execute/sync", {"script": script, "args": []})

    def wait(self, script, seconds=20):
        deadline = time.time() + seconds
        while not (value := self.run(script)):
            if time.time() > deadline:
                raise AssertionError("never true: " + script)
            time.sleep(0.05)
        return value

    def type(self, selector, text):
        found = self.command("/element", {"using": "css selector", "value": selector})
        self.command(f"/element/{next(iter(found.values()))}/value", {"text": text})

    def click(self, selector):
        found = self.command("/element", {"using": "css selector", "value": selector})
        self.command(f"/element/{next(iter(found.values()))}/click", {})

    def screenshot(self, path):
        with open(path, "wb") as file:
            file.write(base64.b64decode(self.command("/screenshot")))

    def close(self):
        self.call(f"/session/{self.session}", method="DELETE")
        self.driver.terminate()
        self.driver.wait()
        self.driver.stdout.close()
        shutil.rmtree(self.profile, ignore_errors=True)


@unittest.skipUnless(
    shutil.which("chromium") and shutil.which("chromedriver"), "needs chromium and chromium-driver"
)
class Page(unittest.TestCase):
    def test_answers_switches_and_shows_the_state(self):
        with Server() as server:
            browser = Browser()
            try:
                self.use(browser, server)
            finally:
                browser.close()

    def use(self, browser, server):
        browser.command("/url", {"url": server.url + "/"})
        browser.wait("return document.getElementById('model').textContent == 'tiny-qwen3.5'")
        browser.run("const send = window.fetch; window.fetch = (path, options) => {"
                    "  if (path.startsWith('/v1/')) options.body = JSON.stringify("
                    "      {...JSON.parse(options.body), ignore_eos: true, seed: 1});"
                    "  return send(path, options); };")  # answers do not end by themselves
        browser.run("document.getElementById('tokens').value = 1500;"
                    "document.getElementById('temperature').value = 1")
        browser.type("#prompt", "class Stack:\ue007")
        answer = "document.querySelector('.message.assistant').textContent"
        begun = browser.wait(f"return {answer}.length")
        browser.wait(f"return {answer}.length > {begun}")
        browser.wait("return Number(document.getElementById('speed').value) > 0")
        rows = "document.querySelectorAll('#picture [data-row]').length"
        browser.wait(f"return {rows} == 17")
        filled = "document.querySelectorAll('#picture .filled').length"
        seen = set()
        for _ in range(20):
            seen.add(browser.run(f"return {filled}"))
            time.sleep(0.05)
        self.assertGreater(len(seen), 1)
        self.assertLessEqual(max(seen), 16)
        if path := os.environ.get("REPLAYSSM_SCREENSHOT"):
            browser.screenshot(path)
        browser.click("#stop")
        server.wait_idle()
        self.assertEqual(browser.run("return document.querySelectorAll('.error').length"), 0)

        browser.click("[data-route=conventional]")
        browser.wait("return document.querySelector('[data-route=conventional]')"
                     ".getAttribute('aria-checked') == 'true'")
        browser.run("document.getElementById('tokens').value = 60")
        browser.click("#plain")
        browser.type("#prompt", "def add(a, b):\ue007")
        browser.wait("return document.getElementById('counts').textContent.startsWith('60 tokens')")
        for route in ("conventional", "output_only"):
            browser.wait(f"return Number(document.getElementById('ms-{route}').textContent) > 0")
        browser.run("document.getElementById('prompt').value = 'x'.repeat(9000)")
        browser.type("#prompt", "\ue007")
        browser.wait("return document.querySelectorAll('.message.error').length == 1")
        if path := os.environ.get("REPLAYSSM_SCREENSHOT"):
            browser.screenshot(path.replace(".png", "-2.png"))
        errors = [entry for entry in browser.command("/se/log", {"type": "browser"})
                  if entry["level"] == "SEVERE" and "status of 400" not in entry["message"]]
        self.assertEqual(errors, [])


if __name__ == "__main__":
    unittest.main()
