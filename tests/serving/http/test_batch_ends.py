"""Kills while a batch makes files of its answers: whatever is cut off, none of them is lost."""

import os

import pytest

from tests.helpers import mostly_slow
from tests.serving.http.served import ScriptedEngine, until
from tests.serving.http.test_batches import answers_of, ended, line, opened, slow_engine, start


class _KillError(BaseException):
    """Ends a batch as a kill would: no handler of the server sees it."""


@pytest.mark.parametrize("is_done", mostly_slow([False, True]))
@pytest.mark.parametrize("step", range(6))
def test_no_answer_is_lost_where_a_batch_is_killed(tmp_path, monkeypatch, step, is_done):
    replace, calls = os.replace, []

    def killed(source, target):
        calls.append(target)
        if len(calls) < step + 1:
            return replace(source, target)
        if len(calls) == step + 1 and is_done:
            replace(source, target)
        raise _KillError

    with opened(slow_engine(0.1), tmp_path, batch_lines=1) as (server, client):
        batch = start(client, [line("a"), line("hot", temperature=-1), line("b")])
        until(lambda: client.batches.retrieve(batch.id).status == "in_progress")
        monkeypatch.setattr(os, "replace", killed)
        until(lambda: not server.server._batches._runs)
        monkeypatch.undo()
    with opened(ScriptedEngine(answers=["Yes."]), tmp_path) as (_, client):
        batch = ended(client, client.batches.retrieve(batch.id))
        assert batch.status == "completed"
        assert answers_of(client, batch.output_file_id).keys() == {"a", "b"}
        assert answers_of(client, batch.error_file_id).keys() == {"hot"}
        counts = batch.request_counts
        assert (counts.total, counts.completed, counts.failed) == (3, 2, 1)
