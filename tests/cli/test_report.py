"""--report FILE.html and `report FILE.json -o FILE.html`: the same page, escaped and well-formed; and reports that are
none. What a browser makes of it is test_page.py's."""

import json
import os
import re
import xml.etree.ElementTree as xml
from hashlib import sha256
from base64 import b64encode
from html.parser import HTMLParser

import numpy as np
import pytest

import report_samples as samples
from conftest import ROOT, refused, run
from dump_builder import Dump

HOSTILE = ["</script><img src=x onerror='window.hacked=1'>", "\"'><svg onload=window.hacked=1>",
           "<!--<script>window.hacked=1</script>", "a\u202e\u2066right to left\u2069", "bell\x07 null\x00 line\nfeed \x1b[31m",
           "javascript:window.hacked=1", "&lt;b&gt; &amp; \\u003cscript\\u003e", "עברית.شبكة.weight", "]]>{{7*7}}${7*7}`", "__proto__"]


def shown(name):
    """A name as gradclip prints it: what could steer a terminal or turn a line stands as \\xNN."""
    steering = re.compile("[\x00-\x1f\x7f-\x9f\u061c\u200b-\u200f\u2028-\u202e\u2060-\u206f\ufeff]")
    return steering.sub(lambda found: "".join(f"\\x{byte:02x}" for byte in found[0].encode()), name)


VOID = {"meta", "link", "input", "br", "hr", "img"}


class Outline(HTMLParser):
    """Checks that elements are closed as they were opened; keeps scripts, styles, charts and attributes."""

    def __init__(self, text):
        super().__init__(convert_charrefs=True)
        self.open, self.elements, self.blocks, self.words = [], [], [], []
        self.feed(text)
        self.close()
        assert self.open == []

    def handle_starttag(self, tag, attributes):
        self.elements.append((tag, dict(attributes)))
        if tag not in VOID:
            self.open.append(tag)

    def handle_startendtag(self, tag, attributes):
        self.elements.append((tag, dict(attributes)))

    def handle_endtag(self, tag):
        assert self.open and self.open.pop() == tag, f"</{tag}> closes what is not open"

    def handle_data(self, text):
        if self.open and self.open[-1] in ("script", "style"):
            self.blocks.append((self.open[-1], text))
        else:
            self.words.append(text)

    def all(self, tag):
        return [attributes for element, attributes in self.elements if element == tag]


def charts(text):
    """Every chart, as XML: what an SVG has to be."""
    return [xml.fromstring(chart) for chart in re.findall(r'<svg class="chart.*?</svg>', text, re.DOTALL)]


def data_of(text):
    """The rows of the page's tables, by what they are."""
    tables = re.findall(r'<div class="table" data-noun="(\w+)">.*?<script type="application/json">(.*?)</script>', text, re.DOTALL)
    return {noun: json.loads(data) for noun, data in tables}


def page_of(tool, report, name="page", **how):
    source, page = tool.folder / f"{name}.json", tool.folder / f"{name}.html"
    source.write_text(json.dumps(report))
    result = run(1, "report", source, "-o", page, **how)
    assert result.code == 0 and result.out == "" and result.err == "", result
    return page.read_text(encoding="utf-8")


@pytest.fixture(scope="module")
def dumps(tmp_path_factory):
    """Two dumps of one model on dp 2 x tp 2, the second with one gradient changed and one rank's copy."""
    folder, random = tmp_path_factory.mktemp("dumps"), np.random.default_rng(3)
    paths = []
    weights = {f"layers.{i}.up.weight": random.standard_normal((8, 4)).astype(np.float32) for i in range(3)}
    for number in range(2):
        dump = Dump(4, device_mesh="world", max_grad_norm=1.0, grad_norm=2.5)
        dump.mesh("world", ["dp", "tp"], [[0, 1], [2, 3]])
        for name, values in weights.items():
            changed = values + np.float32(0.5) if number == 1 and name.startswith("layers.1") else values
            dump.sharded(name, changed, "world", ["Shard(0)", "Shard(1)"])
        dump.sharded("norm.weight", np.full(4, 0.25, np.float32), "world", ["Replicate()", "Replicate()"])
        dump.plain("bias", {0: np.ones(2, np.float32), 1: np.full(2, 1.0 + number, np.float32)}, copies="replicated")
        paths.append(dump.write(folder / f"dump{number}"))
    return paths


def both_ways(tool, *command, code=0, np=1):
    """The page of --report FILE.html, which is that of its JSON too; and the JSON."""
    page, source = tool.fresh("page").with_suffix(".html"), tool.fresh("source").with_suffix(".json")
    assert run(np, *command, "--report", page, "--quiet").code == code
    assert run(np, *command, "--report", source, "--quiet").code == code
    again = tool.fresh("again").with_suffix(".html")
    result = run(np, "report", source, "-o", again)
    assert result.code == 0 and result.out == "" and result.err == "", result

    def without_run(path):
        return re.sub(r'<section id="run".*?</section>', "", path.read_text(encoding="utf-8"), flags=re.DOTALL)
    assert without_run(page) == without_run(again)
    return page.read_text(encoding="utf-8"), json.loads(source.read_text())


def test_norms(tool, dumps):
    page, report = both_ways(tool, "norms", dumps[0])
    assert [mesh["dim_names"] for mesh in report["meshes"]] == [["dp", "tp"]]
    assert report["meshes"][0]["ranks"] == [0, 1, 2, 3] and report["meshes"][0]["device_mesh"] is True
    rows = data_of(page)["parameters"]["rows"]
    assert [row[0] for row in rows] == [each["name"] for each in report["parameters"]]
    assert [row[1] for row in rows] == [each["norm"] for each in report["parameters"]]
    outline = Outline(page)
    words = " ".join(outline.words)
    assert str(report["norm"]["total"]) in words and "Who holds what" in page
    assert {"findings", "totals", "layers", "shares", "statistics", "sharding", "parts", "parameters", "run"} <= {
        section["id"] for section in outline.all("section")}


def heat_map(page, title):
    """{row: {column's name: (class, number)}} of the figure with that title; empty without it."""
    figure = re.search(f"<h3>{title}</h3>.*?(<svg class=\"chart.*?</svg>)", page, re.DOTALL)
    rows = {}
    for cell in xml.fromstring(figure[1]).iter() if figure else ():
        if "cell" not in cell.get("class", "").split():
            continue
        column, said = cell.get("data-tip").split("\n")
        row, value = said.split(": ", 1)
        rows.setdefault(row, {})[column] = cell.get("class").split()[-1], value
    return rows


def test_a_layer_of_nothing_but_nan_is_in_every_row(tool):
    dump = Dump(1)
    for layer in range(2):
        dump.plain(f"layers.{layer}.weight", np.full(4, np.nan, np.float32))
    page, _ = both_ways(tool, "norms", dump.write(tool.fresh("dump")))
    rows = heat_map(page, "Statistics by layer")
    assert set(rows["norm"].values()) == {("alarm", "nan")}, rows
    assert set(rows["NaN or infinite"].values()) == {("alarm", "100.00 %")}, rows


def test_exponents_of_a_view_and_of_what_has_none(tool):
    dump = Dump(1)
    dump.plain("layers.0.up", np.float32([1, 1, 4, 0]))
    dump.plain("layers.1.up", np.full(4, np.inf, np.float32))
    dump.plain("layers.1.down", np.full(4, np.nan, np.float32))
    path = dump.write(tool.fresh("dump"))
    page, _ = both_ways(tool, "norms", path, "--histogram", "--by", "dtype")
    by_type = heat_map(page, "Exponents by dtype")
    assert by_type["2⁰"] == {"float32": (by_type["2⁰"]["float32"][0], "2 elements, 18.2 %")}
    assert by_type["NaN or infinite"] == {"float32": ("alarm", "8 elements, 72.7 %")}
    by_layer = heat_map(page, "Exponents by layer")
    assert by_layer["NaN or infinite"]["layers.1"] == ("alarm", "8 elements, 100 %")
    assert by_layer["2²"]["layers.0"][1] == "1 elements, 33.3 %" and by_layer["2²"]["layers.1"][0] == "none"
    page, _ = both_ways(tool, "norms", path, "--by", "module")
    assert heat_map(page, "Exponents by module") == {}


def test_clip_inspect_verify_and_diff_have_their_pages(tool, dumps):
    page, report = both_ways(tool, "inspect", dumps[0])
    assert "Elements by module" in page and [mesh["name"] for mesh in report["meshes"]] == ["world"]
    page, report = both_ways(tool, "verify", dumps[1], code=1)
    assert "replicas-differ (1)" in page and "Rank files read" in page
    page, report = both_ways(tool, "diff", dumps[0], dumps[1], code=1, np=2)
    assert "layers.1.up.weight" in page and [row[1] for row in data_of(page)["parameters"]["rows"]].count("differs") == 1
    page, out = tool.fresh("page").with_suffix(".html"), tool.fresh("out")
    assert run(1, "clip", dumps[0], "-o", out, "--report", page, "--quiet").code == 0
    assert "measured on what was written" in page.read_text()


def test_the_page_is_one_file_that_asks_for_nothing(tool):
    page = page_of(tool, samples.norms(layers=4, histograms=True, bad=(3,), disagree=True))
    outline = Outline(page)
    for tag, attributes in outline.elements:
        assert not any(name.startswith("on") or name in ("style", "src", "srcset", "srcdoc", "action") for name in attributes), tag
        assert not attributes.get("href", "#").startswith(("http", "/")), attributes
    assert [each["href"][:5] for each in outline.all("link")] == ["data:"]
    policy = next(each["content"] for each in outline.all("meta") if each.get("http-equiv") == "Content-Security-Policy")
    rules = dict(rule.strip().split(" ", 1) for rule in policy.split(";"))
    assert rules["default-src"] == "'none'" and rules["base-uri"] == "'none'" and rules["form-action"] == "'none'"
    styles = [text for kind, text in outline.blocks if kind == "style"]
    scripts = [text for kind, text in outline.blocks if kind == "script" and not text.startswith('{"columns"')]
    for texts, rule, file in ((styles, "style-src", "page.css"), (scripts, "script-src", "page.js")):
        assert texts == [(ROOT / "src/report/page" / file).read_text()]
        assert rules[rule] == f"'sha256-{b64encode(sha256(texts[0].encode()).digest()).decode()}'"
    assert not re.search(r"url\(|@import", styles[0])
    order = [each["id"] for each in outline.all("section")]
    assert order[0] == "findings"


def test_charts_are_svg_and_add_up(tool):
    report = samples.norms(layers=4, histograms=True)
    page = page_of(tool, report)
    drawn = charts(page)
    assert len(drawn) >= 8
    for chart in drawn:
        assert chart.get("aria-label") and chart.get("tabindex") == "0"
        width, height = map(float, chart.get("viewBox").split()[2:])
        for shape in chart.iter("rect"):
            x, y, w, h = (float(shape.get(side)) for side in ("x", "y", "width", "height"))
            assert w >= 0 and h >= 0 and x >= 0 and y >= 0 and x + w <= width + 0.11 and y + h <= height + 0.11

    # The icicle's second row: what each module adds to the square of the total, as a width.
    icicle = next(chart for chart in drawn if chart.get("aria-label") == "Share of the total norm by module")
    widths = {group.get("data-tip").split("\n")[0]: float(group[0].get("width")) for group in icicle.iter("g")}
    total = sum(each["norm"] ** 2 for each in report["parameters"])
    for module in ("model.layers", "model.layers.2", "model.layers.3.mlp"):
        part = sum(each["norm"] ** 2 for each in report["parameters"] if each["name"].startswith(module + "."))
        assert widths[module] == pytest.approx(1080 * part / total, abs=0.06)

    # Bars: as high as the layer's norm, on the axis's scale.
    bars = next(chart for chart in drawn if chart.get("aria-label").startswith("Norm of each layer"))
    heights = {group.get("data-tip").split("\n")[0]: float(group[1].get("height")) for group in bars.iter("g")}
    norms = {layer: np.sqrt(sum(each["norm"] ** 2 for each in report["parameters"] if each["name"].startswith(layer + ".")))
             for layer in [f"model.layers.{i}" for i in range(4)]}
    scale = heights["model.layers.0"] / norms["model.layers.0"]
    for layer, norm in norms.items():
        assert heights[layer] == pytest.approx(scale * norm, abs=0.2)

    # Ranks of one shard have one colour, of different shards different ones.
    grid = next(chart for chart in drawn if chart.get("aria-label") == "Who holds what of stage0 [Shard(0), Replicate()]")
    colours = {group[1].text: group.get("class") for group in grid.iter("g")}
    assert colours["0"] == colours["1"] != colours["2"] == colours["3"] and len(set(colours.values())) == 4


def test_names_are_escaped_everywhere(tool):
    report = samples.norms(names=HOSTILE)
    report["findings"] = [samples.finding(name, name, [0], message=name) for name in HOSTILE]
    report["dump"]["path"] = HOSTILE[0]
    page = page_of(tool, report)
    outline = Outline(page)
    assert outline.all("img") == [] and len(outline.all("html")) == 1
    assert [row[0] for row in data_of(page)["parameters"]["rows"]] == [shown(name) for name in HOSTILE]
    assert [each["data-find"] for each in outline.all("button") if "data-find" in each] == [shown(name) for name in HOSTILE]
    assert all(character.isprintable() or character == "\n" for character in page)
    charts(page)


@pytest.mark.parametrize("change, where, expected", [
    (lambda r: r.update(format="other.report"), "format", "'gradclip.report'"),
    (lambda r: r.update(version=2), "version", "1"),
    (lambda r: r.pop("version"), "has no key 'version'", "'version'"),
    (lambda r: r.update(command=5), "command", "a string"),
    (lambda r: r.pop("dump"), "has no key 'dump'", "'dump'"),
    (lambda r: r["dump"].update(world_size=-1), "dump.world_size", "from 0 to 16777216"),
    (lambda r: r["findings"].append(samples.finding("x", ranks=[2 ** 31 - 1])), "ranks[0]", "from 0 to 16777215"),
    (lambda r: r["parameters"][3].update(norm="much"), "parameters[3].norm", "a number"),
    (lambda r: r["parameters"][0].update(shape=[1.5]), "parameters[0].shape[0]", "an integer"),
    (lambda r: r.update(parameters={}), "parameters", "a list"),
    (lambda r: r["meshes"][1].update(shape=[3, 3]), "meshes[1].shape", "the ranks' shape"),
    (lambda r: r["meshes"][1].update(shape=[2 ** 62, 4]), "meshes[1].shape", "the ranks' shape"),
    (lambda r: r["meshes"][1].update(shape=[]), "meshes[1].shape", "the ranks' shape"),
    (lambda r: r["meshes"][2].update(dim_names=["dp"]), "meshes[2].dim_names", "2"),
    (lambda r: r["groups"][0].update(placements=["Shard(0)"]), "groups[0].placements", "2, as many as"),
    (lambda r: r["groups"][0].update(placements=["Shard(0)", "Sharded"]), "groups[0].placements[1]", "Replicate"),
    (lambda r: r["findings"].append({"message": "no kind"}), "findings[0]", "'kind'"),
    (lambda r: r["parameters"][0]["histogram"]["exponents"].update(first=5000), "histogram.exponents.first", "1023"),
    (lambda r: r["parameters"][0]["histogram"]["exponents"].update(first=1020), "exponents.counts", "exponents of float64"),
])
def test_what_is_no_report_is_refused_by_its_key(tool, change, where, expected):
    report = samples.norms(layers=1, histograms=True)
    change(report)
    source, page = tool.folder / "source.json", tool.folder / "page.html"
    source.write_text(json.dumps(report))
    refused(1, 3, tool.folder / "none", "report", source, "-o", page, mentions=("source.json", where, expected))
    assert os.listdir(tool.folder) == ["source.json"]


@pytest.mark.parametrize("text, mentions", [
    ("", "well-formed"), ("[]", "not a JSON object"), ("{" * 70, "well-formed"), ('{"a":1,"a":2}', "stands twice"),
    ('{"format":"gradclip.report","version":1,"command":"norms","dump":NaN}', "NaN"), ('{"a":' + "[" * 70 + "]" * 70 + "}", "deeper than 64"),
    ('{"format":"gradclip.report","version":1e999}', "float64"), ("\xff", "well-formed")])
def test_what_is_no_json_is_refused(tool, text, mentions):
    source = tool.folder / "source.json"
    source.write_bytes(text.encode("latin-1"))
    refused(1, 3, tool.folder / "none", "report", source, "-o", tool.folder / "page.html", mentions=("source.json", mentions))


def test_usage(tool, dumps):
    source, page = tool.folder / "source.json", tool.folder / "page.html"
    source.write_text(json.dumps(samples.check()))
    for code, *words, mentions in [
            (2, "report", source, "--output OUT is missing"), (2, "report", "-o", page, "FILE.json is missing"),
            (2, "report", source, "-o", source, "it is the input"), (2, "report", source, "-o", tool.folder, "directory"),
            (2, "report", source, "-o", tool.folder / "page.csv", "ends in .html"),
            (2, "report", source, "-o", page, "--norm-type", "2", "--norm-type"),
            (3, "report", tool.folder / "none.json", "-o", page, "none.json"), (3, "report", dumps[0], "-o", page, "dump0"),
            (2, "report", source, "-o", tool.folder / "none" / "page.html", "page.html")]:
        refused(1, code, tool.folder / "none", *words, mentions=(mentions,))
    link = tool.folder / "link.html"
    link.symlink_to(source)
    refused(1, 2, tool.folder / "none", "report", source, "-o", link, mentions=("it is the input",))
    assert json.loads(source.read_text())["command"] == "check"
    refused(2, 3, tool.folder / "none", "report", tool.folder / "none.json", "-o", page, mentions=("none.json",))
    doctor = tool.folder / "doctor.json"
    assert run(1, "doctor", "--report", doctor, "--quiet").code == 0
    refused(1, 3, tool.folder / "none", "report", doctor, "-o", page, mentions=("doctor.json", "reports of doctor have no page"))
    assert run(1, "report", source, "-o", "/dev/stdout").out.startswith("<!DOCTYPE html>")


def test_numbers_beyond_the_script_and_extremes(tool):
    report = samples.norms(names=["a.weight", "b.weight", "c.weight", "d.weight"])
    for each, norm in zip(report["parameters"], (1e300, 5e-324, 0.0, "inf")):
        each["norm"], each["max_abs"], each["min_abs"] = norm, norm, None
        each["elements"] = 2 ** 62 + 1
    report["norm"]["total"] = "inf"
    page = page_of(tool, report)
    rows = data_of(page)["parameters"]["rows"]
    assert [row[1] for row in rows] == [1e300, 5e-324, 0, "inf"] and rows[0][10] == "4611686018427387905"
    charts(page)
    for p in ("inf", 1, 0.5):
        report = samples.norms(layers=2)
        report["norm"]["type"] = p
        charts(page_of(tool, report))


def test_check_and_sweep(tool):
    page = page_of(tool, samples.check())
    outline, rows = Outline(page), data_of(page)["items"]["rows"]
    failed = [row for row in rows if row[2] == "failed"]
    assert len(rows) == 80 and len(failed) == 6 and failed[0] == ["model.embed_tokens.weight", "norm", "failed", "0.5", "0.75", 0.5, 5e-7]
    assert rows[0][0] == "(whole model)" and rows[2][3:5] == ["[4,8]", "[4,8]"]
    assert "Regressed, 74 of 80 items pass" in outline.words and "gradclip check: regressed: 6 findings" in outline.words
    assert "verdict bad" in page and "verdict good" in page_of(tool, samples.check("passed"))

    page = page_of(tool, samples.sweep())
    assert [row[:3] for row in data_of(page)["limits"]["rows"]] == [[0.5, 29, 29], [1.0, 28, 29], [2.0, 19, 29], [4.0, 0, 29]]
    bars = {group.get("data-tip").split("\n")[0]: float(group[1].get("height")) for group in charts(page)[1].iter("g")}
    assert bars["max norm 2"] == pytest.approx(bars["max norm 0.5"] * 19 / 29, abs=0.11) and bars["max norm 4"] == 0


def test_tables_of_steps_labels_microbatches_and_tensors(tool, dumps):
    page, report = both_ways(tool, "norms", *dumps, "--sweep", "0.5,5")
    assert data_of(page)["steps"]["rows"] == [[each["path"], each["step"], each["total"], each["type"], each["findings"]]
                                              for each in report["steps"]]
    assert len(data_of(page)["limits"]["rows"]) == 2

    labelled = Dump(4, device_mesh="world", ignore_index=-100)
    labelled.mesh("world", ["dp", "tp"], [[0, 1], [2, 3]])
    labelled.plain("w", np.ones(2, np.float32))
    labelled.labels = {rank: [np.arange(6).reshape(2, 3), np.array([[1, -100]])] for rank in range(4)}
    page, report = both_ways(tool, "tokens", labelled.write(tool.fresh("labels")))
    counts = ["sequences", "elements", "label_tokens", "tail_padding"]
    assert data_of(page)["ranks"]["rows"] == [[each["rank"], each["coordinate"], "" if each["counted"] else "a copy", 2]
                                              + [each[key] for key in counts] for each in report["ranks"]]
    assert len(report["ranks"]) == 4 and [row[2] for row in data_of(page)["ranks"]["rows"]] == ["", "a copy"] * 2
    assert data_of(page)["microbatches"]["rows"] == [[k] + [each[key] for key in counts]
                                                     for k, each in enumerate(report["microbatches"])]

    microbatches = []
    for index in range(2):
        dump = Dump(1)
        dump.plain("w", np.ones(2, np.float32))
        dump.more["microbatch"] = {"index": index, "count": 2, "first_microbatch": index == 0}
        microbatches.append(dump.write(tool.fresh("microbatch")))
    page, report = both_ways(tool, "accumulate", *microbatches, "--check", microbatches[0], code=1)
    assert data_of(page)["microbatches"]["rows"] == [[0, "on", "", "", "", "no"], [1, "off", "", "", "", "yes"]]
    assert "parameters" in data_of(page)  # the comparison

    names = ["embed.weight", HOSTILE[0]]
    dump = Dump(1)
    for name in names:
        dump.plain(name, np.ones((2, 3), np.float32))
    merged, out = dump.write(tool.fresh("dump")), tool.fresh("merged")
    page, report = both_ways(tool, "merge", merged, "-o", out, "--overwrite")
    rows = data_of(page)["parameters"]["rows"]
    assert [row[0] for row in rows] == [shown(name) for name in names]
    assert [row[1:8] for row in rows] == [["written", "2 × 3", "float32", "float32", None, 6, 24]] * 2
    assert [row[8] for row in rows] == [shown(each["name_in_output"]) for each in report["parameters"]]


def test_a_large_mesh_is_drawn_in_part(tool):
    report = samples.norms(layers=1)
    report["meshes"][1] = {"name": "stage0", "dim_names": ["dp", "tp"], "shape": [2048, 8], "ranks": list(range(16384)),
                           "device_mesh": False, "moe_mesh": False}
    page = page_of(tool, report)
    grid = next(chart for chart in charts(page) if chart.get("aria-label").startswith("Who holds what of stage0"))
    assert len(list(grid.iter("g"))) == 1024 and "The first 1,024 of 16,384 ranks are drawn" in page
