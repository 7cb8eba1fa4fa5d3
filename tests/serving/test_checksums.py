"""Checksums of values: damage that takes the checksum with it, or its name, is found too."""

import json

import pytest

from jaxshare.serving import checksums, jsonl

VALUE = {"workers": 2, "problem": "one", "reply": "They agree on all that is asked."}


def test_a_span_that_is_lost_does_not_take_the_checksum_with_it():
    """After the last text it would: from within that text to within the digits is JSON again."""
    line = jsonl.line(checksums.sealed(VALUE))
    assert checksums.loads(line) == VALUE and line.startswith(b'{"checksum": ')
    for start in range(len(line)):
        for end in range(start + 1, len(line)):
            damaged = line[:start] + line[end:]
            try:
                found = checksums.loads(damaged)
            except ValueError:
                continue
            # Fields may be gone, which the readers miss, but none has another value.
            assert isinstance(found, dict)
            assert all(found.get(name, value) == value for name, value in VALUE.items())


@pytest.mark.parametrize("name", ["checkm", "chucksum", "checksumcheck", "hecksum"])
def test_a_checksum_whose_name_is_damaged_is_not_taken_for_a_former_version(name):
    sealed = checksums.sealed(VALUE)
    damaged = {name: sealed.pop(checksums.FIELD), **sealed, "reply": "another"}
    with pytest.raises(ValueError, match=f"its first field is '{name}', which may have been"):
        checksums.loads(json.dumps(damaged))
    assert checksums.loads(json.dumps(VALUE)) == VALUE, "of a former version"
