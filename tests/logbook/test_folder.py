"""A run's folder: what is written is read back, also after a kill."""

import csv
import json
import math

import pytest

from fedstill.core import source
from fedstill.core.errors import BadValue, RunFolderError
from fedstill.core.release import Spending
from fedstill.logbook import (
    FolderLog,
    Note,
    Number,
    Traffic,
    environment,
    read_rows,
    read_run,
    summarise,
    write_json,
    write_summary,
)

EVENTS = [
    Note(0, "engine", "", "in_process, because the device is a cpu"),
    Number(1, "update", "mnist", "loss", "", 0.1 + 0.2),
    Traffic(1, "update", "mnist", "up", "weights", 10, 40, 1),
    Number(1, "evaluate", "server", "accuracy", "mnist", 1 / 3),
    Note(2, "absent", "usps", 'said "no", then nothing, twice'),
    Number(2, "update", "mnist", "loss", "", 1e-300),
    Traffic(2, "broadcast", "server", "down", "weights", 10, 40, 3),
    Number(3, "evaluate", "server", "accuracy", "mnist", 0.5),
]


def folder_with(path, events=EVENTS, summary=True):
    with FolderLog(path) as log:
        for event in events:
            log.write(event)
    (path / "recipe.toml").write_text('[method]\nname = "fedavg"\n')
    if summary:
        write_summary(path, summarise(read_rows(path)))
    return path


def test_events_are_read_back_exactly_and_in_order(tmp_path):
    run = read_run(folder_with(tmp_path / "run"))
    assert run.metrics == [event for event in EVENTS if isinstance(event, Number)]
    assert run.messages == [event for event in EVENTS if isinstance(event, Traffic)]
    assert run.notes == [event for event in EVENTS if isinstance(event, Note)]
    assert run.recipe == {"method": {"name": "fedavg"}}


def test_tables_are_plain_csv_that_needs_no_library(tmp_path):
    folder = folder_with(tmp_path)
    with (folder / "messages.csv").open(newline="") as file:
        rows = list(csv.DictReader(file))
    assert rows[1]["hearers"] == "3"
    head = (folder / "metrics.csv").read_text().splitlines()[0]
    assert head == "round,step,node,name,target,value"
    assert (folder / "notes.csv").read_text().splitlines()[0] == "round,kind,node,text"


def test_values_that_are_not_finite_come_back(tmp_path):
    values = [math.inf, -math.inf, math.nan]
    events = [Number(1, "update", "a", "loss", "", value) for value in values]
    folder = folder_with(tmp_path, events)
    read = [row.value for row in read_rows(folder).metrics]
    assert read[:2] == values[:2] and math.isnan(read[2])
    lines = (folder / "metrics.csv").read_text().splitlines()
    assert lines[-1] == "1,update,a,loss,,"  # what is undefined is an empty cell
    older = lines[-1] + "nan\n"  # as written before
    (folder / "metrics.csv").write_text("\n".join(lines[:-1]) + "\n" + older)
    assert math.isnan(read_rows(folder).metrics[-1].value)


def test_a_note_of_several_lines_is_kept_on_one(tmp_path):
    folder = folder_with(tmp_path, [Note(1, "warning", "", "one\ntwo\r\nthree")])
    assert read_rows(folder).notes[0].text == "one two three"


def test_a_folder_opened_again_is_appended_to_under_one_header(tmp_path):
    folder_with(tmp_path, EVENTS[:4])
    folder_with(tmp_path, EVENTS[4:])
    assert read_rows(tmp_path).metrics == [e for e in EVENTS if isinstance(e, Number)]


def test_rows_are_on_the_disk_after_a_flush(tmp_path):
    log = FolderLog(tmp_path)
    log.write(EVENTS[1])
    log.flush()
    assert read_rows(tmp_path).metrics == [EVENTS[1]]
    log.close()


def test_a_table_has_its_header_from_the_moment_it_is_there(tmp_path):
    log = FolderLog(tmp_path)
    log.write(Spending(1, "update", "mnist", "gaussian", 1.0, 0.5, 2))
    rows = read_rows(tmp_path)  # as after a kill: nothing was flushed
    assert not rows.privacy and not rows.metrics
    log.close()
    assert len(read_rows(tmp_path).privacy) == 1


def test_a_rewind_drops_later_rounds_and_writing_goes_on(tmp_path):
    folder_with(tmp_path)
    again = Number(2, "update", "mnist", "loss", "", 7.0)
    with FolderLog(tmp_path) as log:
        log.rewind(1)
        log.write(again)
    rows = read_rows(tmp_path)
    assert [row.round for row in rows.metrics] == [1, 1, 2]
    assert rows.metrics[-1] == again
    assert [row.round for row in rows.messages] == [1]
    assert [row.round for row in rows.notes] == [0]
    assert not [path.name for path in tmp_path.iterdir() if path.name.endswith(".new")]


def test_a_rewind_counts_rows_written_a_moment_before(tmp_path):
    with FolderLog(tmp_path) as log:
        for event in EVENTS:
            log.write(event)
        log.rewind(2)
    assert [row.round for row in read_rows(tmp_path).metrics] == [1, 1, 2]


@pytest.mark.parametrize("cut", [1, 5, 12])
def test_a_last_line_cut_by_a_kill_is_dropped(tmp_path, cut):
    folder_with(tmp_path)
    whole = (tmp_path / "metrics.csv").read_bytes()
    (tmp_path / "metrics.csv").write_bytes(whole[:-cut])
    assert [row.round for row in read_rows(tmp_path).metrics] == [1, 1, 2]
    with FolderLog(tmp_path) as log:
        log.rewind(2)
        log.write(Number(3, "evaluate", "server", "accuracy", "mnist", 0.5))
    assert (tmp_path / "metrics.csv").read_bytes() == whole


def test_a_cut_inside_a_letter_or_the_header_is_survived(tmp_path):
    folder_with(tmp_path, [Note(1, "warning", "", "Öl")])
    whole = (tmp_path / "notes.csv").read_bytes()
    (tmp_path / "notes.csv").write_bytes(whole[: whole.index("Ö".encode()) + 1])
    (tmp_path / "messages.csv").write_bytes(b"round,st")
    with FolderLog(tmp_path) as log:
        log.write(Note(1, "warning", "", "Öl"))
    assert (tmp_path / "notes.csv").read_bytes() == whole
    assert read_rows(tmp_path).messages == []


def test_a_folder_that_cannot_be_made_is_refused_with_its_name(tmp_path):
    (tmp_path / "file").write_text("")
    with pytest.raises(RunFolderError, match=r"cannot write .*file.*: "):
        FolderLog(tmp_path / "file" / "run")


def test_a_table_of_another_program_is_not_appended_to(tmp_path):
    (tmp_path / "metrics.csv").write_text("epoch,loss\n1,2\n")
    with pytest.raises(RunFolderError, match="another version or program"):
        FolderLog(tmp_path)
    assert (tmp_path / "metrics.csv").read_text() == "epoch,loss\n1,2\n"


def test_reading_names_what_is_wrong_with_a_folder(tmp_path):
    with pytest.raises(RunFolderError, match="there is no run folder"):
        read_run(tmp_path / "nowhere")
    (tmp_path / "foreign").mkdir()
    (tmp_path / "foreign" / "photo.jpg").write_text("")
    with pytest.raises(RunFolderError, match=r"not the folder of a run.*photo\.jpg"):
        read_run(tmp_path / "foreign")
    with pytest.raises(RunFolderError, match="is a file"):
        read_run(tmp_path / "foreign" / "photo.jpg")


def test_an_unfinished_run_says_how_to_go_on(tmp_path):
    folder = folder_with(tmp_path / "run", summary=False)
    with pytest.raises(RunFolderError, match=f"not finished; fedstill resume {folder}"):
        read_run(folder)
    assert len(read_run(folder, unfinished=True).metrics) == 4


def test_a_broken_line_is_named_by_file_and_number(tmp_path):
    folder = folder_with(tmp_path)
    with (folder / "metrics.csv").open("a") as file:
        file.write("4,update,mnist,loss,,a lot\n")
    with pytest.raises(RunFolderError, match=r"metrics\.csv, line 6: .*a lot"):
        read_run(folder)


def test_json_is_written_whole_and_refuses_what_json_cannot_hold(tmp_path):
    write_json(tmp_path / "a.json", {"value": 1})
    with pytest.raises(ValueError):
        write_json(tmp_path / "a.json", {"value": math.nan})
    assert json.loads((tmp_path / "a.json").read_text()) == {"value": 1}
    assert [path.name for path in tmp_path.iterdir()] == ["a.json"]


def test_the_environment_names_versions_and_threads():
    found = environment()
    assert {"fedstill", "python", "torch", "numpy", "device", "threads"} <= set(found)
    assert found["code"] == source.own_digest()
    json.dumps(found)


def test_a_run_whose_clients_were_not_scored_has_no_matrix(tmp_path):
    with pytest.raises(BadValue, match="no client's model was scored"):
        read_run(folder_with(tmp_path)).matrix()
