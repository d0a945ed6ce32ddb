"""A headless Chromium, driven by its DevTools protocol over two pipes: no package, no port."""

import fcntl
import json
import os
import select
import shutil
import subprocess
import tempfile
import time

import pytest

OPTIONS = ["--headless", "--remote-debugging-pipe", "--no-sandbox", "--disable-gpu", "--disable-dev-shm-usage",
           "--disable-extensions", "--disable-background-networking", "--disable-component-update", "--disable-sync",
           "--no-first-run", "--no-default-browser-check", "--hide-scrollbars"]
PATIENCE = 60  # seconds for any answer: nothing may hang


def executable():
    for name in ("chromium", "chromium-browser", "google-chrome"):
        if path := shutil.which(name):
            return path
    pytest.fail("there is no Chromium: scripts/setup.sh --python installs one")


class Browser:
    def __init__(self):
        self.profile = tempfile.mkdtemp(prefix="gradclip-browser-")
        child_reads, self.out = os.pipe()
        self.into, child_writes = os.pipe()
        # The protocol's descriptors are 3 and 4; away from these first, so that the shell can put them there.
        high = [fcntl.fcntl(descriptor, fcntl.F_DUPFD, 20) for descriptor in (child_reads, child_writes)]
        self.process = subprocess.Popen(
            ["bash", "-c", f'exec "$0" "$@" 3<&{high[0]} 4>&{high[1]}', executable(), *OPTIONS,
             f"--user-data-dir={self.profile}", "about:blank"],
            stdin=subprocess.DEVNULL, stdout=subprocess.DEVNULL, stderr=subprocess.DEVNULL, pass_fds=high)
        for descriptor in (child_reads, child_writes, *high):
            os.close(descriptor)
        self.last_id, self.text, self.messages = 0, b"", []

    def close(self):
        try:
            self.send("Browser.close")
            self.process.wait(10)
        except (OSError, subprocess.TimeoutExpired):
            self.process.kill()
            self.process.wait()
        os.close(self.out)
        os.close(self.into)
        shutil.rmtree(self.profile, ignore_errors=True)

    def send(self, method, session=None, **parameters):
        self.last_id += 1
        message = {"id": self.last_id, "method": method, "params": parameters}
        if session:
            message["sessionId"] = session
        data = json.dumps(message).encode() + b"\0"
        while data:
            data = data[os.write(self.out, data):]
        return self.last_id

    def receive(self, deadline):
        """One more message."""
        while b"\0" not in self.text:
            ready, _, _ = select.select([self.into], [], [], max(0.0, deadline - time.monotonic()))
            assert ready, f"the browser said nothing for {PATIENCE} s"
            data = os.read(self.into, 1 << 20)
            assert data, "the browser ended"
            self.text += data
        line, self.text = self.text.split(b"\0", 1)
        self.messages.append(json.loads(line))
        return self.messages[-1]

    def ask(self, method, session=None, **parameters):
        number = self.send(method, session, **parameters)
        deadline = time.monotonic() + PATIENCE
        while True:
            message = self.receive(deadline)
            if message.get("id") == number:
                assert "error" not in message, f"{method}: {message['error']}"
                return message["result"]

    def open(self, file, **how):
        return Page(self, file, **how)


class Page:
    """A page that was loaded from a file, and everything that it asked for or complained of."""

    def __init__(self, browser, file, *, dark=False, scripts=True):
        self.browser, self.url = browser, f"file://{os.path.abspath(file)}"
        self.target = browser.ask("Target.createTarget", url="about:blank")["targetId"]
        self.session = browser.ask("Target.attachToTarget", targetId=self.target, flatten=True)["sessionId"]
        self.begin = len(browser.messages)
        for domain in ("Page", "Runtime", "Log", "Network"):
            self.ask(f"{domain}.enable")
        self.ask("Performance.enable", timeDomain="threadTicks")  # the thread's processor time, whatever else runs
        self.ask("Emulation.setDeviceMetricsOverride", width=1280, height=900, deviceScaleFactor=1, mobile=False)
        self.colours(dark)
        if not scripts:
            self.ask("Emulation.setScriptExecutionDisabled", value=True)
        self.ask("Page.navigate", url=self.url)
        self.wait("Page.loadEventFired")

    def close(self):
        self.browser.ask("Target.closeTarget", targetId=self.target)

    def __enter__(self):
        return self

    def __exit__(self, *_):
        self.close()

    def ask(self, method, **parameters):
        return self.browser.ask(method, self.session, **parameters)

    def events(self, method):
        return [message["params"] for message in self.browser.messages[self.begin:]
                if message.get("method") == method and message.get("sessionId") == self.session]

    def wait(self, method):
        deadline = time.monotonic() + PATIENCE
        while not self.events(method):
            self.browser.receive(deadline)

    def colours(self, dark):
        self.ask("Emulation.setEmulatedMedia", features=[{"name": "prefers-color-scheme", "value": "dark" if dark else "light"}])

    def run(self, expression):
        """What a JavaScript expression is; promises are waited for."""
        answer = self.ask("Runtime.evaluate", expression=expression, returnByValue=True, awaitPromise=True)
        assert "exceptionDetails" not in answer, answer["exceptionDetails"]
        return answer["result"].get("value")

    def requests(self):
        """Addresses that it asked for, without its own."""
        return [event["request"]["url"] for event in self.events("Network.requestWillBeSent")
                if event["request"]["url"] != self.url]

    def complaints(self):
        return (self.events("Runtime.exceptionThrown") + self.events("Runtime.consoleAPICalled")
                + self.events("Log.entryAdded") + self.events("Page.javascriptDialogOpening"))

    def seconds(self):
        """Processor time of the page's main thread so far, by what it was for."""
        metrics = {each["name"]: each["value"] for each in self.ask("Performance.getMetrics")["metrics"]}
        return {name: metrics[name] for name in ("TaskDuration", "ScriptDuration", "LayoutDuration", "RecalcStyleDuration")}

    # ------------------------------------------------------------------------------------------------------------------
    # Hands
    # ------------------------------------------------------------------------------------------------------------------

    def middle(self, selector, index=0):
        """Where the element is in the window, scrolled to."""
        return self.run(f"""(() => {{
            const element = document.querySelectorAll({json.dumps(selector)})[{index}];
            element.scrollIntoView({{block: "center", behavior: "instant"}});
            const box = element.getBoundingClientRect();
            return [box.left + box.width / 2, box.top + box.height / 2];
        }})()""")

    def point(self, selector, index=0):
        x, y = self.middle(selector, index)
        # Scrolling hides a tooltip: its event comes with the next frame.
        self.run("new Promise((done) => requestAnimationFrame(() => requestAnimationFrame(done)))")
        self.ask("Input.dispatchMouseEvent", type="mouseMoved", x=x, y=y)
        return x, y

    def click(self, selector, index=0):
        x, y = self.point(selector, index)
        for kind in ("mousePressed", "mouseReleased"):
            self.ask("Input.dispatchMouseEvent", type=kind, x=x, y=y, button="left", clickCount=1)

    def type(self, selector, text):
        self.run(f"document.querySelector({json.dumps(selector)}).focus()")
        self.ask("Input.insertText", text=text)

    def press(self, key):
        for kind in ("keyDown", "keyUp"):
            self.ask("Input.dispatchKeyEvent", type=kind, key=key, code=key)

    def texts(self, selector):
        return self.run(f"[...document.querySelectorAll({json.dumps(selector)})].map((each) => each.textContent)")

    def screenshot(self, file):
        import base64
        size = self.ask("Page.getLayoutMetrics")["cssContentSize"]
        picture = self.ask("Page.captureScreenshot", captureBeyondViewport=True,
                           clip={"x": 0, "y": 0, "width": size["width"], "height": min(size["height"], 16000), "scale": 1})
        with open(file, "wb") as out:
            out.write(base64.b64decode(picture["data"]))
