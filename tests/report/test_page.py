"""The report in a real browser: what it shows, what it does, and what it never does."""

from __future__ import annotations

import http.client
import json
import re
import threading
import zipfile
from collections.abc import Iterator
from itertools import pairwise
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from typer.testing import CliRunner

from fedstill.commands.cli import app
from fedstill.core.errors import RunFolderError
from fedstill.report import image_sets
from fedstill.report.page import live
from fedstill.report.page.content import content, found_in
from fedstill.report.page.document import document, embedded
from report import chromium, handmade

needs_browser = pytest.mark.skipif(chromium.PROGRAM is None, reason="no Chromium on this machine")


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return handmade.everything(tmp_path_factory.mktemp("report") / "runs")


@pytest.fixture(scope="module")
def values(folder: Path) -> dict[str, Any]:
    return content(found_in([folder]))


@pytest.fixture(scope="module")
def page(folder: Path, values: dict[str, Any]) -> Iterator[chromium.Page]:
    path = folder / "report.html"
    path.write_text(document(values), encoding="utf-8")
    with chromium.browser() as opened:
        opened.size(1280, 900)
        opened.scheme("light")
        opened.open(path.as_uri())
        yield opened


def method(values: dict[str, Any], name: str) -> dict[str, Any]:
    return next(each for each in values["methods"] if each["name"] == name)


def test_scores_are_means_over_seeds_and_an_unfinished_seed_does_not_count_beside_a_finished_one(
    values: dict[str, Any],
) -> None:
    # fedavg after round 4, north, south, east: 0.38, 0.33, 0.28 and 0.01 more with seed 1.
    mean, spread, seeds = method(values, "fedavg")["scores"]["average_accuracy"]
    assert mean == pytest.approx(0.33 + 0.005)
    assert spread == pytest.approx(0.01 / 2**0.5, rel=1e-4)
    assert seeds == 2
    assert method(values, "desa")["seeds"] == ["0"]
    assert method(values, "desa")["unfinished"] == 1
    assert [run["status"] for run in values["runs"]].count("unfinished") == 1


def test_curves_bytes_and_seconds_are_those_of_the_tables(values: dict[str, Any]) -> None:
    run = next(run for run in values["runs"] if run["folder"].endswith("feddm/seed-0"))
    assert run["metrics"]["accuracy"]["mean"][1][-1] == pytest.approx(0.38 + 0.2 - 0.05)
    assert run["metrics"]["accuracy"]["by"]["north"][1][0] == pytest.approx(0.32 + 0.2)
    assert run["bytes"] == [[1, 2, 3, 4], [16_000, 32_000, 48_000, 64_000]]  # 3 up and 1 down
    assert run["heard"][1][-1] == 4 * (3 * 4000 + 3 * 4000)
    assert run["seconds"][1] == [2, 4, 6, 8]


def test_a_client_with_a_model_of_its_own_is_judged_by_that_model_at_home(
    values: dict[str, Any],
) -> None:
    run = next(run for run in values["runs"] if run["folder"].endswith("desa/seed-0"))
    assert run["metrics"]["accuracy"]["by"]["south"][1][-1] == pytest.approx(0.38 + 0.1 - 0.05)


def test_values_cannot_end_the_script_they_stand_in(values: dict[str, Any]) -> None:
    text = document(values)
    assert text.count("</script>") == 2  # that of the values and that of the script
    assert handmade.NASTY not in text and "<b>east" not in text
    assert json.loads(embedded({"a": handmade.NASTY + "\u2028"}))["a"] == handmade.NASTY + "\u2028"
    assert document({**values, "title": "%%SCRIPT%% <x>"}).count("%%SCRIPT%% &lt;x&gt;") == 1


def test_a_folder_without_runs_is_refused_and_a_broken_run_is_named(tmp_path: Path) -> None:
    with pytest.raises(RunFolderError, match="holds no run"):
        content(found_in([tmp_path]))
    handmade.run_folder(tmp_path / "good")
    broken = handmade.run_folder(tmp_path / "broken")
    (broken / "metrics.csv").write_text("round,who\n1,me\n")
    found = content(found_in([tmp_path]))
    assert len(found["runs"]) == 1
    assert "broken/metrics.csv has the columns" in found["remarks"][0]
    header = (tmp_path / "good" / "notes.csv").read_text().splitlines()[0]
    handmade.run_folder(tmp_path / "long")
    (tmp_path / "long" / "notes.csv").write_text(f"{header}\n1,warning,,{'x' * 200_000}\n")
    assert (
        "long/notes.csv, line 2: field larger than" in content(found_in([tmp_path]))["remarks"][1]
    )


def test_methods_stand_in_the_order_of_the_recipe(tmp_path: Path) -> None:
    for name in ("beta", "alpha", "gamma"):
        handmade.run_folder(tmp_path / name, method=name)
    assert names(tmp_path) == ["alpha", "beta", "gamma"]
    (tmp_path / "grid.toml").write_text('[grid]\ncells = ["gamma", "alpha", "beta"]\n')
    assert names(tmp_path) == ["gamma", "alpha", "beta"]


def names(folder: Path) -> list[str]:
    return [each["name"] for each in content(found_in([folder]))["methods"]]


def test_an_audit_is_shown_without_the_points_of_its_curves(tmp_path: Path) -> None:
    handmade.run_folder(tmp_path / "run")
    findings = [{"subject": "DP-SGD", "auc": 0.7, "curve": [[i / 300, 0.5] for i in range(300)]}]
    (tmp_path / "audit.json").write_text(json.dumps({"findings": findings, "notes": ["one"]}))
    (audit,) = content(found_in([tmp_path]))["audits"]
    shown = {"subject": "DP-SGD", "auc": 0.7, "curve": "300 values, in the file"}
    assert audit["content"] == {"findings": [shown], "notes": ["one"]}


def test_images_of_another_form_are_refused_and_left_out(tmp_path: Path) -> None:
    run = handmade.run_folder(tmp_path / "run")
    handmade.images(run, rounds=(2, 4))
    kept = run / "pictures" / "synthetic"
    np.savez(kept / "round-00004.npz", nodes=np.array([{"a": 1}], dtype=object))
    with pytest.raises(RunFolderError, match="holds no synthetic images"):
        image_sets.read(kept / "round-00004.npz")
    (sets, *_) = image_sets.read(kept / "round-00002.npz")
    assert sets.images[0, 0, 0, 0, 0] == 51  # 0.2 of 255
    assert sets.there.tolist() == [[True, True], [True, False]]
    shown = content(found_in([run]))["images"]["shown"]
    assert {image["round"] for image in shown} == {2}


def test_images_that_would_fill_the_memory_are_left_out_unread(tmp_path: Path) -> None:
    run = handmade.run_folder(tmp_path / "run")
    handmade.images(run, rounds=(2,))
    kept = run / "pictures" / "synthetic"
    with (
        zipfile.ZipFile(kept / "round-00003.npz", "w", zipfile.ZIP_DEFLATED) as packed,
        packed.open("nodes.npy", "w", force_zip64=True) as part,
    ):
        for _ in range(1 + image_sets.MOST_BYTES // 2**20):
            part.write(bytes(2**20))
    assert (kept / "round-00003.npz").stat().st_size < 2**20
    with pytest.raises(RunFolderError, match=r"bytes once it is unpacked, the limit is"):
        image_sets.read(kept / "round-00003.npz")
    with zipfile.ZipFile(kept / "round-00004.npz", "w") as packed:
        head = f"{{'descr': '|u1', 'fortran_order': False, 'shape': ({2**62},)}}\n"
        text = b"\x93NUMPY\x01\x00" + len(head).to_bytes(2, "little") + head.encode()
        packed.writestr("nodes.npy", text)
    with pytest.raises(RunFolderError, match="holds no synthetic images"):
        image_sets.read(kept / "round-00004.npz")
    shown = content(found_in([run]))["images"]["shown"]
    assert {image["round"] for image in shown} == {2}


def test_when_there_is_no_room_the_last_round_is_kept_and_the_rest_counted(tmp_path: Path) -> None:
    run = handmade.run_folder(tmp_path / "run")
    handmade.images(run, rounds=(1, 2, 3, 4))
    one = len(content(found_in([run]))["images"]["shown"][0]["png"])
    found = content(found_in([run]), images=3 * one + one // 2)["images"]
    assert {image["round"] for image in found["shown"]} == {4}
    assert (len(found["shown"]), found["left_out"]) == (3, 9)


def test_many_large_images_are_thinned_to_what_a_round_has_room_for() -> None:
    stack = np.zeros((100, 5, 128, 128, 3))
    kept = image_sets.kept({f"client-{number}": stack for number in range(2)})
    assert len(kept) == 1  # 100 classes of 64 x 64 x 3 are more than a million numbers
    assert kept[0].images.shape == (100, 1, 64, 64, 3)
    few = image_sets.kept({"a": np.zeros((2, 5, 8, 8, 1)), "b": np.zeros((2, 5, 8, 8, 1))})
    assert [each.images.shape for each in few] == [(2, 5, 8, 8, 1)] * 2


@needs_browser
def test_the_page_asks_nobody_and_complains_of_nothing(page: chromium.Page, folder: Path) -> None:
    asked = [url for url in page.requests if not url.startswith("data:")]
    assert asked == [(folder / "report.html").as_uri()]
    assert page.complaints == []
    assert page.js("document.title") == "runs · fedstill"
    assert page.js("document.querySelectorAll('img, main script, main b i').length") == 0


@needs_browser
@pytest.mark.parametrize(
    ("what", "expression", "expected"),
    [
        ("names are text", "document.querySelector('#clients th:nth-child(4)').textContent",
         "<b>east</b>"),
        ("notes are text", "document.querySelector('.note.warn').textContent.includes('onerror')",
         True),
        ("the recipe's note is text", "document.querySelector('.lead').textContent",
         handmade.NASTY),
        ("a row for each method",
         "[...document.querySelectorAll('#results-table tbody tr')].map(r => r.dataset.method)",
         ["desa", "fedavg", "feddm"]),
        ("the mean over seeds",
         "document.querySelector('tr[data-method=feddm] td').textContent.replace(/\\s/g, '')",
         "58.50±0.71"),
        ("the best is marked",
         "document.querySelector('tr[data-method=feddm] td').className", "best"),
        ("the reported number",
         "document.querySelector('#results').textContent.includes('Somebody 2020')", True),
        ("ours less the reported",
         "document.querySelector('tr[data-method=feddm]').textContent.includes('+13.50')", True),
        ("a curve for each method",
         "document.querySelectorAll('#curve-chart path[data-series]').length", 3),
        ("a band over seeds", "document.querySelectorAll('#curve-chart polygon').length", 2),
        ("the partition", "document.querySelector('#partition-table tbody tr').textContent",
         "north1010"),
        ("class names are text",
         "document.querySelector('#partition-table thead th:nth-child(3)').textContent",
         "<i>dog</i>"),
        ("the cross-accuracy matrix",
         "document.querySelector('#matrix-table tbody td.own').textContent", "48.0"),
        ("networks beside the models",
         "document.querySelector('#matrix-table tbody th').textContent", "north convnet"),
        ("confusions are summed over test sets",
         "[...document.querySelectorAll('#confusion-table tbody tr:first-child td')]"
         ".map(c => c.textContent)", ["9", "3"]),
        ("recall is the share found",
         "[...document.querySelectorAll('#recall-bars .amount')].map(c => c.textContent)",
         ["75.0 %", "50.0 %"]),
        ("traffic by field",
         "document.querySelector('#traffic table').textContent.includes('to the server')", True),
        ("bytes of a run", "document.querySelector('#traffic-bars .amount').textContent", "64 kB"),
        ("the shift map", "document.querySelectorAll('#shift circle').length", 3),
        ("distances of clients",
         "[...document.querySelectorAll('#shift td:nth-child(2)')].map(c => c.textContent)",
         ["0.25", "0.20"]),
        ("the privacy ledger",
         "document.querySelectorAll('#privacy tbody tr').length", 2),
        ("sentences stand in lines of their own",
         "[...document.querySelectorAll('#privacy .tree dd > div > div')].map(d => d.textContent)",
         ["of this run: others, with other seeds, add up", "noise is simulated"]),
        ("the audits", "document.querySelector('#privacy .audit').textContent.includes('10')",
         True),
        ("versions", "document.querySelector('#origin').textContent.includes('torch')", True),
        ("the recipe to copy",
         "document.querySelector('#recipe-text').textContent.startsWith('[about]')", True),
        ("an unfinished run is said",
         "document.querySelector('.pill').textContent", "5 of 6 runs finished"),
        ("its progress", "document.querySelector('#progress').textContent.includes('2 / 4')",
         True),
        ("each heading of a table says of what",
         "[...document.querySelectorAll('thead th')]"
         ".filter(h => !h.textContent || !h.scope).length",
         0),
        ("an entry for each section shown",
         "document.querySelectorAll('nav.toc a').length", 15),
    ],
    ids=lambda value: value if isinstance(value, str) and " " in value and "(" not in value else "",
)  # fmt: skip
def test_the_report_shows(page: chromium.Page, what: str, expression: str, expected: Any) -> None:
    assert page.js(expression) == expected, what


@needs_browser
def test_a_method_can_be_hidden_and_shown_again(page: chromium.Page) -> None:
    chip = "document.querySelector('.chip[data-method=feddm]')"
    rows = "document.querySelectorAll('#results-table tbody tr:not(.off)').length"
    page.js(f"{chip}.click()")
    assert page.js(rows) == 2
    assert page.js("document.querySelectorAll('#curve-chart path[data-series]').length") == 2
    assert page.js("document.querySelector('[data-section=images]').hidden")  # only feddm has any
    assert (
        page.js("document.querySelector('.fact b').textContent") == "36.33 %"
    )  # desa's: (48 + 43 + 38) / 3 - 10 * 2 / 3
    page.js(f"{chip}.click()")
    assert page.js(rows) == 3


@needs_browser
def test_a_client_can_be_chosen(page: chromium.Page) -> None:
    choose(page, "client", "south")
    assert page.js("document.querySelectorAll('#partition-table tbody tr').length") == 1
    assert "test set of south" in page.js("document.querySelector('#curves p').textContent")
    assert page.js("document.querySelectorAll('#gallery figure').length") == 1
    assert page.js("document.querySelector('#results-table th.chosen').textContent") == "south"
    choose(page, "client", "")
    assert page.js("document.querySelectorAll('#gallery figure').length") == 3


@needs_browser
def test_the_curve_can_be_drawn_by_bytes_and_of_another_metric(page: chromium.Page) -> None:
    choose(page, "by", "bytes")
    texts = "[...document.querySelectorAll('#curve-chart text')].map(t => t.textContent).join('|')"
    assert "60 kB" in page.js(texts)
    choose(page, "metric", "loss")
    assert page.js("document.querySelector('#curve-chart svg').getAttribute('aria-label')") == (
        "loss by bytes sent, each message once"
    )
    choose(page, "metric", "accuracy")
    choose(page, "by", "round")


@needs_browser
def test_the_pointer_over_a_curve_shows_the_values_of_that_round(page: chromium.Page) -> None:
    page.js("document.querySelector('#curves').scrollIntoView({behavior: 'instant'})")
    box = page.js(
        "(() => { const b = document.querySelector('#curve-chart svg').getBoundingClientRect(); "
        "return [b.left, b.top, b.width, b.height]; })()"
    )
    left, top, width, height = box
    page.send("Input.dispatchMouseEvent", type="mouseMoved", x=left + width - 16,
              y=top + height / 2)  # fmt: skip
    text = page.js("document.querySelector('#curve-chart .tip').textContent")
    assert text.startswith("round 4")
    assert "feddm53.50 % ± 0.71 %" in text
    page.send("Input.dispatchMouseEvent", type="mouseMoved", x=2, y=2)
    assert page.js("document.querySelector('#curve-chart .tip').hidden")


@needs_browser
def test_a_heading_sorts_the_table(page: chromium.Page) -> None:
    order = "[...document.querySelectorAll('#results-table tbody tr')].map(r => r.dataset.method)"
    heading = "[...document.querySelectorAll('#results-table thead button')].find(b => " \
              "b.textContent === 'global')"  # fmt: skip
    page.js(f"{heading}.click()")
    assert page.js(order) == ["feddm", "desa", "fedavg"]
    page.js(f"{heading}.click()")
    assert page.js(order) == ["fedavg", "desa", "feddm"]
    assert page.js(f"{heading}.parentElement.getAttribute('aria-sort')") == "ascending"


@needs_browser
def test_the_slider_of_images_goes_through_the_rounds(page: chromium.Page) -> None:
    drawn = "document.querySelector('#gallery canvas').dataset.drawn"
    middle = (
        "[...document.querySelector('#gallery canvas').getContext('2d').getImageData(3, 3, 1, 1)"
        ".data]"
    )
    page.wait(drawn)
    assert page.js("document.querySelector('#stage-value').textContent") == "round 4"
    assert page.js(middle)[0] == 102  # 0.4 of 255
    slide(page, "stage", 0)
    page.wait(drawn)
    assert page.js("document.querySelector('#stage-value').textContent") == "round 2"
    assert page.js(middle)[0] == 51
    missing = middle.replace("getImageData(3, 3", "getImageData(12, 12")
    assert page.js(missing)[3] == 0  # where an image is missing nothing is drawn
    page.complaints = [text for text in page.complaints if "getImageData" not in text]  # ours


@needs_browser
def test_the_slider_of_costs_says_who_reaches_an_accuracy_and_for_what(page: chromium.Page) -> None:
    slide(page, "reach", 50)
    text = page.js("document.querySelector('#reach-table').textContent")
    # feddm has 0.475, 0.495, 0.515, … in the mean of both seeds: from round 3 on.
    assert re.search(r"feddm3\s?6 s48 kB", text)
    assert "fedavgnot reached; best 33.50 %" in text


@needs_browser
def test_dark_light_phone_and_print(page: chromium.Page, tmp_path: Path) -> None:
    back = "getComputedStyle(document.body).backgroundColor"
    light = page.js(back)
    page.js("document.querySelector('#theme').click()")
    assert page.js(back) != light
    assert page.screenshot(tmp_path / "dark.png").stat().st_size > 20_000
    page.size(390, 844, phone=True)
    assert page.js("document.documentElement.scrollWidth") <= 390  # nothing sticks out
    page.size(1280, 900)
    page.scheme("dark", media="print")
    assert page.js(back) == "rgb(255, 255, 255)"
    assert page.js("getComputedStyle(document.querySelector('.bar')).display") == "none"
    assert page.printed().startswith(b"%PDF")
    page.scheme("light")
    assert page.complaints == []


@needs_browser
@pytest.mark.parametrize("width", [1280, 500])
def test_numbers_stand_beside_long_names_of_methods(
    page: chromium.Page, tmp_path: Path, width: int
) -> None:
    for number in range(2):
        name = f"feddm (per_class={number}, real_batch=256, server_batch=256, server_epochs=500)"
        run = handmade.run_folder(tmp_path / "runs" / str(number), method=name, number=number)
        handmade.images(run)
    path = tmp_path / "report.html"
    path.write_text(document(content(found_in([tmp_path / "runs"]))), encoding="utf-8")
    page.size(width, 900)
    page.open(path.as_uri())
    for section in ("results", "cost", "clients"):
        table = f"document.querySelector('#{section} .scroll')"
        number = f"{table}.querySelector('tbody tr td').getBoundingClientRect()"
        assert page.js(f"{number}.right <= {table}.getBoundingClientRect().right"), section
    assert page.js("document.documentElement.scrollWidth") <= width  # nothing sticks out
    page.size(1280, 900)


@needs_browser
def test_models_scored_at_home_only_have_no_other_column_and_the_note_says_so(
    page: chromium.Page, tmp_path: Path
) -> None:
    handmade.run_folder(tmp_path / "runs" / "local", method="local", home=True)
    handmade.run_folder(tmp_path / "runs" / "fedavg")
    path = tmp_path / "report.html"
    path.write_text(document(content(found_in([tmp_path / "runs"]))), encoding="utf-8")
    page.open(path.as_uri())
    headings = "[...document.querySelectorAll('#results thead button')].map(h => h.textContent)"
    assert page.js(headings)[3:6] == ["local", "reported", "ours − reported"]
    said = page.js("document.querySelector('#results').textContent")
    assert "global" not in said and "inter" not in said
    assert "each is scored on its own test set alone" in said


LEAST_CONTRAST = """Math.min(...
  [...document.querySelectorAll('.heat tbody td:not(.none)')].map((cell) => {
  const pen = document.createElement('canvas').getContext('2d');
  const light = (colour) => {
    pen.fillStyle = colour; pen.fillRect(0, 0, 1, 1);
    const [r, g, b] = [...pen.getImageData(0, 0, 1, 1).data].map((each) => each / 255)
      .map((each) => each <= 0.03928 ? each / 12.92 : ((each + 0.055) / 1.055) ** 2.4);
    return 0.2126 * r + 0.7152 * g + 0.0722 * b + 0.05;
  };
  const { color, backgroundColor } = getComputedStyle(cell);
  const [low, high] = [light(color), light(backgroundColor)].sort((a, b) => a - b);
  return high / low; }))"""


@needs_browser
@pytest.mark.parametrize(("scheme", "media"), [("light", ""), ("dark", ""), ("dark", "print")])
def test_numbers_in_coloured_cells_can_be_read(
    page: chromium.Page, folder: Path, scheme: str, media: str
) -> None:
    page.scheme(scheme, media)
    page.open((folder / "report.html").as_uri())
    assert page.js(LEAST_CONTRAST) >= 4.5  # what WCAG 2 asks for
    page.scheme("light")
    page.open((folder / "report.html").as_uri())


@needs_browser
def test_many_clients_stand_below_each_other_and_fit_a_printed_page(
    page: chromium.Page, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(handmade, "CLIENTS", tuple(f"client-{number:02}" for number in range(40)))
    monkeypatch.setattr(handmade, "accuracy", lambda method, seed, round, client: client / 100)
    handmade.run_folder(tmp_path / "runs" / "0", rounds=1)
    handmade.run_folder(tmp_path / "runs" / "1", rounds=1, method="local", home=True)
    path = tmp_path / "report.html"
    path.write_text(document(content(found_in([tmp_path / "runs"]))), encoding="utf-8")
    page.size(700, 1000)  # as wide as A4 without its margins
    page.scheme("light", "print")
    page.open(path.as_uri())
    assert page.js("document.querySelectorAll('#clients tbody tr').length") == 40
    right = "document.querySelector('#clients table').getBoundingClientRect().right"
    assert page.js(right) <= 700
    page.size(1280, 900)
    page.scheme("light")


@needs_browser
def test_tables_of_two_kinds_of_data_have_no_name_in_common(
    page: chromium.Page, tmp_path: Path
) -> None:
    handmade.run_folder(tmp_path / "runs" / "0")
    other = handmade.run_folder(tmp_path / "runs" / "1", method="local")
    recipe = (other / "recipe.toml").read_text().replace('"digits"', '"letters"')
    (other / "recipe.toml").write_text(recipe)
    path = tmp_path / "report.html"
    path.write_text(document(content(found_in([tmp_path / "runs"]))), encoding="utf-8")
    page.open(path.as_uri())
    assert page.js("document.querySelectorAll('#results table').length") == 2
    names = page.js("[...document.querySelectorAll('[id]')].map(each => each.id)")
    assert len(names) == len(set(names))


@needs_browser
def test_labels_of_the_axis_of_accuracies_are_where_they_say(
    page: chromium.Page, tmp_path: Path
) -> None:
    handmade.run_folder(tmp_path / "run", rounds=7)  # from 27 to 39 %: a line every 2.5 %
    path = tmp_path / "report.html"
    path.write_text(document(content(found_in([tmp_path / "run"]))), encoding="utf-8")
    page.open(path.as_uri())
    texts = "[...document.querySelectorAll('#curve-chart text')].map(t => t.textContent)"
    labels = [float(text[:-2]) for text in page.js(texts) if text.endswith(" %")]
    apart = [after - before for before, after in pairwise(labels)]
    assert len(apart) > 2 and apart == pytest.approx([apart[0]] * len(apart)), labels


@needs_browser
def test_fifty_runs_of_a_hundred_rounds_stay_small_and_open_quickly(
    page: chromium.Page, tmp_path: Path
) -> None:
    for number in range(50):
        name, seed = f"method-{number // 5}", number % 5
        place = tmp_path / "runs" / name / str(seed)
        handmade.run_folder(place, method=name, number=number // 25, seed=seed, rounds=100)
    path = tmp_path / "report.html"
    path.write_text(document(content(found_in([tmp_path / "runs"]))), encoding="utf-8")
    assert path.stat().st_size < 8_000_000
    before = page.cpu_seconds()
    page.open(path.as_uri())
    assert page.cpu_seconds() - before < 2  # of the browser's work, however busy the machine is
    assert page.js("document.querySelectorAll('#results-table tbody tr').length") == 10
    assert page.complaints == []


def asked(port: int, path: str, **headers: str) -> tuple[int, bytes, str]:
    """The answer of the live view: status, content and mark."""
    line = http.client.HTTPConnection("127.0.0.1", port, timeout=10)
    line.putrequest("GET", path, skip_host="Host" in headers)
    for name, value in headers.items():
        line.putheader(name.replace("_", "-"), value)
    line.endheaders()
    answer = line.getresponse()
    found = answer.status, answer.read(), answer.headers.get("ETag", "")
    line.close()
    return found


@pytest.fixture
def serving(tmp_path: Path) -> Iterator[tuple[int, Path]]:
    made = live.server(live.Watched([tmp_path]))
    thread = threading.Thread(target=live.serve, args=(made,))
    thread.start()
    yield made.server_address[1], tmp_path
    made.shutdown()
    thread.join(10)


def test_the_live_view_answers_this_machine_alone_and_hands_out_no_file(
    serving: tuple[int, Path],
) -> None:
    port, folder = serving
    (folder / "secret.txt").write_text("mine")
    assert asked(port, "/")[0] == 200
    assert asked(port, "/secret.txt")[0] == 404
    assert asked(port, "/../secret.txt")[0] == 404
    assert asked(port, "/", Host="elsewhere.example:80")[0] == 403  # a name that points here


def test_the_live_view_reads_folders_again_when_something_has_changed(
    serving: tuple[int, Path],
) -> None:
    port, folder = serving
    assert b"holds no run" in asked(port, "/content.json")[1]
    handmade.run_folder(folder / "run", done=2)
    status, body, mark = asked(port, "/content.json")
    assert (status, json.loads(body)["runs"][0]["done"]) == (200, 2)
    assert asked(port, "/content.json", If_None_Match=mark)[0] == 304
    handmade.run_folder(folder / "run", done=3)
    assert json.loads(asked(port, "/content.json", If_None_Match=mark)[1])["runs"][0]["done"] == 3


def test_the_view_ends_by_itself(tmp_path: Path) -> None:
    result = CliRunner().invoke(app, ["view", str(tmp_path), "--for", "0.1"])
    assert result.exit_code == 0, result.output
    assert "http://127.0.0.1:" in result.stdout


@needs_browser
def test_the_live_page_follows_a_run_without_being_loaded_again(
    page: chromium.Page, serving: tuple[int, Path]
) -> None:
    port, folder = serving
    page.open(f"http://127.0.0.1:{port}/")
    assert "holds no run" in page.js("document.querySelector('#notes').textContent")
    run = handmade.run_folder(folder / "run", done=2)
    page.wait("document.querySelector('#progress')")
    assert "2 / 4" in page.js("document.querySelector('#progress').textContent")
    handmade.images(run, rounds=(2,))
    page.wait("document.querySelectorAll('#gallery canvas[data-drawn]').length === 3")
    handmade.run_folder(folder / "run")
    page.wait("document.querySelector('#progress').textContent.includes('finished')")
    assert page.complaints == []
    assert {url.split("/")[2] for url in page.requests if url.startswith("http")} == {
        f"127.0.0.1:{port}"
    }


def choose(page: chromium.Page, name: str, value: str) -> None:
    page.js(
        f"(() => {{ const box = document.querySelector('select[aria-label={name}]'); "
        f"box.value = {json.dumps(value)}; box.dispatchEvent(new Event('change')); }})()"
    )


def slide(page: chromium.Page, name: str, value: int) -> None:
    page.js(
        f"(() => {{ const box = document.querySelector('#{name}'); box.value = {value}; "
        "box.dispatchEvent(new Event('input')); })()"
    )
