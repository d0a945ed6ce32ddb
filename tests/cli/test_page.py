"""The HTML page in a real browser: what it shows, that it does what it says, and that it asks the network for nothing."""

import json
import math

import pytest

import report_samples as samples
from browser import Browser
from conftest import run
from test_report import HOSTILE, shown

TABLE = "#parameters .table"


@pytest.fixture(scope="module")
def browser():
    browser = Browser()
    yield browser
    browser.close()


@pytest.fixture(scope="module")
def make_page(tmp_path_factory):
    folder = tmp_path_factory.mktemp("pages")

    def make(report, name="page"):
        source, page = folder / f"{name}.json", folder / f"{name}.html"
        source.write_text(json.dumps(report))
        result = run(1, "report", source, "-o", page)
        assert result.code == 0 and result.err == "", result
        return page
    return make


def check_quiet(page):
    assert page.complaints() == []
    assert [url for url in page.requests() if not url.startswith("data:")] == []


def names_shown(page, table=TABLE):
    return page.texts(f"{table} tbody td:first-child")


REPORTS = {"norms": lambda: samples.norms(layers=8, histograms=True, disagree=True, bad=(5,)),
           "clip": lambda: samples.norms(layers=4, command="clip"),
           "one": lambda: samples.norms(names=["weight"]),
           "diff": lambda: samples.diff(layers=12, wrong_from=5),
           "equal": lambda: samples.diff(layers=2),
           "verify": samples.verify,
           "clean": lambda: samples.verify([]),
           "check": samples.check,
           "passed": lambda: samples.check("passed"),
           "sweep": samples.sweep,
           "tokens": samples.tokens,
           "accumulate": samples.accumulate,
           "merge": samples.merge,
           "empty": lambda: samples.head("norms", 0, 1) | {"parameters": [], "findings": []}}
WITHOUT_CHARTS = ("clean", "check", "passed", "tokens", "accumulate", "empty")


@pytest.mark.parametrize("name", REPORTS)
def test_every_page_opens_without_a_complaint_or_a_request(name, browser, make_page):
    report = REPORTS[name]()
    with browser.open(make_page(report, name)) as page:
        assert page.texts("header .command") == [f"gradclip {report['command']}"]
        assert page.run("document.querySelectorAll('svg.chart').length") >= (0 if name in WITHOUT_CHARTS else 1)
        if name == "check":  # what is exact is shown in full
            assert {"7,355,310", "7,355,311"} <= set(page.texts("tbody td"))
        # Every chart says what it is, and none is wider than the page.
        assert all(page.run("[...document.querySelectorAll('svg.chart')].map((each) => each.getAttribute('aria-label'))"))
        assert page.run("document.documentElement.scrollWidth <= window.innerWidth")
        links = page.run("[...document.querySelectorAll('nav a')].map((a) => [a.hash, !!document.querySelector(a.hash)])")
        assert all(there for _, there in links) and len(links) == page.run("document.querySelectorAll('section').length")
        check_quiet(page)


def test_findings_come_first(browser, make_page):
    with browser.open(make_page(samples.norms(layers=8, bad=(5,)))) as page:
        assert page.run("document.querySelector('section').id") == "findings"
        assert page.texts(".findings .find") == ["model.layers.0.self_attn.o_proj.weight"]
        page.click(".findings .find")
        assert names_shown(page) == ["model.layers.0.self_attn.o_proj.weight"]
        check_quiet(page)


def test_sorting(browser, make_page):
    report = samples.norms(layers=20, bad=(7,))
    names = [each["name"] for each in report["parameters"]]

    def size(each):
        return math.inf if each["norm"] == "nan" else each["norm"]
    falling = [each["name"] for each in sorted(report["parameters"], key=size, reverse=True)]
    assert len(names) == len(falling) > 100 and falling[0] == names[7], "NaN is above all numbers"
    with browser.open(make_page(report)) as page:
        button, header = f"{TABLE} th:nth-child(2) button", f"{TABLE} th:nth-child(2)"
        state = f"document.querySelector('{header}').getAttribute('aria-sort')"
        assert names_shown(page) == names[:100]
        page.click(button)
        assert page.run(state) == "descending" and names_shown(page) == falling[:100]
        page.click(button)
        assert page.run(state) == "ascending" and names_shown(page) == falling[::-1][:100]
        page.click(button)
        assert page.run(state) is None and names_shown(page) == names[:100]
        page.click(f"{TABLE} th:nth-child(1) button")  # layers.2 before layers.10
        order = names_shown(page)
        assert order.index("model.layers.2.mlp.up_proj.weight") < order.index("model.layers.10.mlp.up_proj.weight")
        check_quiet(page)


def test_searching_and_turning_pages(browser, make_page):
    report = samples.norms(layers=40)
    names = [each["name"] for each in report["parameters"]]
    with browser.open(make_page(report)) as page:
        box = f"{TABLE} input"
        assert page.texts(f"{TABLE} output") == [f"{len(names)} parameters, rows 1 to 100"]
        for _ in range(3):
            page.click(f"{TABLE} [data-page=next]")
        assert names_shown(page) == names[300:]
        assert page.run(f"document.querySelector('{TABLE} [data-page=next]').disabled")
        page.click(f"{TABLE} [data-page=previous]")
        assert names_shown(page) == names[200:300]

        page.type(box, "LAYERS.3 q_proj")
        found = [name for name in names if "layers.3" in name and "q_proj" in name]
        assert len(found) == 11 and names_shown(page) == found
        assert page.texts(f"{TABLE} output") == [f"11 of {len(names)} parameters"]
        page.press("Escape")
        assert names_shown(page) == names[:100]
        page.type(box, "stage1 replicate")  # the sharding is searched too
        assert names_shown(page) == [each["name"] for each in report["parameters"]
                                     if each["mesh"] == "stage1" and "Replicate()" in each["placements"]][:100]
        page.press("Escape")
        page.type(box, "no such thing")
        assert names_shown(page) == [] and page.texts(f"{TABLE} output") == [f"0 of {len(names)} parameters"]
        check_quiet(page)


def test_tables_of_other_commands_are_sorted_and_searched_too(browser, make_page):
    with browser.open(make_page(samples.tokens())) as page:
        table = "#ranks .table"
        assert page.texts(f"{table} output") == ["300 ranks, rows 1 to 100"]
        page.click(f"{table} th:nth-child(7) button")
        page.click(f"{table} th:nth-child(7) button")
        assert names_shown(page, table) == [str(rank) for rank in range(299, 199, -1)]
        page.type(f"{table} input", "copy")
        assert page.texts(f"{table} output") == ["150 of 300 ranks, rows 1 to 100"]
        assert len(page.texts("#microbatches tbody tr")) == 8
        check_quiet(page)
    with browser.open(make_page(samples.merge(HOSTILE))) as page:
        assert names_shown(page) == [shown(name) for name in HOSTILE]
        assert page.run("window.hacked") is None
        check_quiet(page)


def test_hovering_and_the_keyboard_show_values(browser, make_page):
    report = samples.norms(layers=8, histograms=True)
    layer = [each for each in report["parameters"] if each["name"].startswith("model.layers.3.")]
    norm = math.sqrt(sum(each["norm"] ** 2 for each in layer))
    share = sum(each["share"] for each in layer)
    with browser.open(make_page(report)) as page:
        def tip():
            return page.run("document.getElementById('tip').hidden ? null : document.getElementById('tip').textContent")
        assert tip() is None
        bar = "#layers svg.chart:first-of-type [data-find='model.layers.3.']"
        page.point(bar)
        assert tip().splitlines()[0] == "model.layers.3"
        assert f"2-norm {norm:.4g}" in tip() and f"share {100 * share:.2f} %" in tip(), tip()
        page.point("h1")
        assert tip() is None
        page.click(bar)
        assert names_shown(page) == [each["name"] for each in layer]

        page.run("document.querySelector('#layers svg.chart').focus()")
        for _ in range(5):
            page.press("ArrowRight")
        assert tip().splitlines()[0] == "model.layers.3", "the fifth after embed_tokens, 0, 1, 2"
        page.press("ArrowLeft")
        page.press("Enter")
        assert names_shown(page)[0].startswith("model.layers.2.")
        check_quiet(page)


def test_depth_of_modules(browser, make_page):
    with browser.open(make_page(samples.norms(layers=4))) as page:
        def rows():
            return page.run("""[...document.querySelectorAll("[data-choice]")].filter((each) => !each.hidden)
                .flatMap((each) => [...each.querySelectorAll("text.name")].map((name) => name.textContent))""")
        page.click(".choices input[value='2']")
        assert rows() == ["model.embed_tokens", "model.layers", "model.norm", "lm_head"]
        page.click(".choices input[value='3']")
        assert rows() == ["model.embed_tokens", *[f"model.layers.{i}" for i in range(4)], "model.norm", "lm_head"]
        check_quiet(page)


CONTRAST = """(() => {
    const light = (colour) => {
        const [r, g, b] = colour.match(/[\\d.]+/g).slice(0, 3).map((part) => part / 255)
            .map((part) => (part <= 0.03928 ? part / 12.92 : ((part + 0.055) / 1.055) ** 2.4));
        return 0.2126 * r + 0.7152 * g + 0.0722 * b;
    };
    const ground = light(getComputedStyle(document.body).backgroundColor);
    const worst = ["body", "h1", ".sub", ".command", "a", ".find", "td", "figcaption p", "footer", "th button"]
        .map((selector) => light(getComputedStyle(document.querySelector(selector)).color))
        .concat(["svg text.tick", "svg text.name"].map((s) => light(getComputedStyle(document.querySelector(s)).fill)))
        .map((ink) => (Math.max(ink, ground) + 0.05) / (Math.min(ink, ground) + 0.05));
    return [ground, Math.min(...worst)];
})()"""


def test_light_and_dark(browser, make_page):
    with browser.open(make_page(samples.norms(layers=8, bad=(5,)))) as page:
        ground, contrast = page.run(CONTRAST)
        assert ground > 0.9 and contrast >= 4.5
        page.colours(dark=True)
        ground, contrast = page.run(CONTRAST)
        assert ground < 0.05 and contrast >= 4.5
        check_quiet(page)


def test_ten_thousand_parameters(browser, make_page):
    report = samples.norms(layers=1111)
    names = [each["name"] for each in report["parameters"]]
    assert len(names) >= 10000
    file = make_page(report, "large")
    with browser.open(file) as page:
        page.run("new Promise((done) => requestAnimationFrame(() => requestAnimationFrame(done)))")
        opened = page.seconds()
        page.type(f"{TABLE} input", "layers.1000. down_proj")
        assert names_shown(page) == ["model.layers.1000.mlp.down_proj.weight"]
        page.press("Escape")
        page.click(f"{TABLE} th:nth-child(2) button")
        used = page.seconds()
        print(f"\n{file.stat().st_size / 1e6:.1f} MB: opened in {opened['TaskDuration']:.2f} s of the main thread "
              f"(script {opened['ScriptDuration']:.2f}, style {opened['RecalcStyleDuration']:.2f}, layout "
              f"{opened['LayoutDuration']:.2f}); search and sort {used['TaskDuration'] - opened['TaskDuration']:.2f} s")
        # Five times what is promised: this is processor time, but of whatever processor.
        assert opened["TaskDuration"] < 10
        # What keeps it so: elements do not grow with parameters.
        assert page.run("document.querySelectorAll('*').length") < 12000
        assert len(names_shown(page)) == 100
        check_quiet(page)


def test_hostile_names_do_nothing(browser, make_page):
    report = samples.norms(names=[*HOSTILE, *samples.model_names(1)], histograms=True)
    for name in HOSTILE:
        report["findings"].append(samples.finding(name, name, [0], [1], math.nan, name))
    report["groups"][0]["mesh"] = report["meshes"][0]["name"] = report["parameters"][0]["mesh"] = HOSTILE[0]
    report["groups"][0]["placements"] = ["Replicate()", "Shard(0)", "Partial(sum)"]
    report["meshes"][0]["dim_names"] = HOSTILE[:3]
    report["dump"]["path"] = report["scale"]["explanation"] = report["run"]["device_detail"] = "".join(HOSTILE)
    for hostile in (report, samples.diff(names=HOSTILE, wrong_from=-1),
                    samples.verify([samples.finding(name, name, [1], message=name) for name in HOSTILE])):
        with browser.open(make_page(hostile, "hostile")) as page:
            check_quiet(page)
            assert page.run("typeof window.hacked") == "undefined"
            assert page.run("document.querySelectorAll('img, iframe, a[href^=javascript], [onerror], [onload], [style]').length") == 0
            assert page.run("[...document.scripts].filter((each) => each.type !== 'application/json').length") == 1
            assert page.run("document.title").count("\n") == 0
            if hostile["command"] != "verify":
                assert names_shown(page)[:len(HOSTILE)] == [shown(name) for name in HOSTILE]
                # Hovering shows a name as text, and finding it in the table does too.
                page.run("for (const each of document.querySelectorAll('[data-tip]')) "
                         "each.dispatchEvent(new PointerEvent('pointermove', {bubbles: true}))")
                page.click(".findings .find")
                assert shown(HOSTILE[0]) in names_shown(page)
            assert page.run("typeof window.hacked") == "undefined"
            check_quiet(page)


def test_the_policy_forbids_the_network_and_other_scripts(browser, make_page):
    with browser.open(make_page(samples.check())) as page:
        assert page.run("fetch('https://gradclip.invalid/').then(() => 'reached', () => 'refused')") == "refused"
        assert page.run("""new Promise((done) => {
            document.addEventListener("securitypolicyviolation", (event) => done(event.effectiveDirective));
            const script = document.createElement("script");
            script.textContent = "window.hacked = true";
            document.body.append(script);
        })""") in ("script-src", "script-src-elem")
        assert page.run("typeof window.hacked") == "undefined"
        assert page.run("""new Promise((done) => {
            const image = document.createElement("img");
            image.addEventListener("error", () => done("refused"));
            image.src = "https://gradclip.invalid/x.png";
        })""") == "refused"
        assert not any(url.startswith("http") for url in
                       [event["response"]["url"] for event in page.events("Network.responseReceived")])


def test_without_scripts_the_charts_and_findings_are_there(browser, make_page):
    with browser.open(make_page(samples.norms(layers=4, bad=(5,)), "quiet"), scripts=False) as page:
        document = page.ask("DOM.getDocument", depth=-1)["root"]["nodeId"]

        def count(selector):
            return len(page.ask("DOM.querySelectorAll", nodeId=document, selector=selector)["nodeIds"])
        assert count("svg.chart") >= 5 and count(".findings li") == 1 and count("noscript") == 1
        assert count(f"{TABLE} tbody tr") == 0
        check_quiet(page)
