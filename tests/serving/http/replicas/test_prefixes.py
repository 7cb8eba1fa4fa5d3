"""The rule by which requests go to replicas, and where a request has to go."""

import json
import random

import pytest

from jaxshare.serving.http.replicas.prefixes import BLOCK_BYTES, PrefixMap, prefix_keys
from jaxshare.serving.http.replicas.routes import ForwardedRequest, Route, holder_of, route_of

HELD = "resp_ab12cd34-" + "0" * 32
COMMON = "x" * BLOCK_BYTES * 3


def idle(*names):
    return dict.fromkeys(names, 0)


def posted(path="/v1/completions", **body):
    return route_of(ForwardedRequest("POST", path, body=json.dumps(body).encode()))


def common_blocks(one: Route, other: Route) -> int:
    """The equal keys of two routes from the start on."""
    count = 0
    for first, second in zip(one.keys, other.keys, strict=False):
        if first != second:
            break
        count += 1
    return count


@pytest.mark.parametrize("size", [0, 1, 63, 64, 65, 200, 70_000])
def test_a_text_has_a_key_for_each_full_block_of_its_first_64_kib(size):
    text = random.Random(size).randbytes(size)
    assert len({*prefix_keys(text)}) == min(size // BLOCK_BYTES, 1024)


@pytest.mark.parametrize("changed", [0, 64, 150, 255, 256])
def test_keys_are_equal_up_to_the_block_that_differs(changed):
    text = bytearray(random.Random(1).randbytes(320))
    keys = prefix_keys(bytes(text))
    text[changed] ^= 1
    block = changed // BLOCK_BYTES
    others = prefix_keys(bytes(text))
    assert others[:block] == keys[:block]
    assert not {*others[block:]} & {*keys[block:]}


def test_the_longest_common_prefix_decides():
    known = PrefixMap()
    known.add(prefix_keys(b"a" * 64), "one")
    known.add(prefix_keys(b"a" * 128), "two")
    known.add(prefix_keys(b"b" * 640), "three")
    assert known.order(prefix_keys(b"a" * 640), idle("one", "two", "three"))[0] == "two"
    assert known.order(prefix_keys(b"a" * 64 + b"c" * 64), idle("one", "three"))[0] == "one"
    assert known.order(prefix_keys(b"b" * 64), idle("one", "two", "three"))[0] == "three"


def test_a_replica_that_is_much_busier_loses():
    known = PrefixMap(spread=4)
    keys = prefix_keys(b"a" * 64)
    known.add(keys, "one")
    assert known.order(keys, {"one": 4, "two": 0}) == ["one", "two"]
    assert known.order(keys, {"one": 5, "two": 0}) == ["two", "one"]
    assert known.order(keys, {"one": 9, "two": 5}) == ["one", "two"]
    # Among the busy ones, the least busy comes first, whatever they have read.
    assert known.order(keys, {"one": 9, "two": 0, "three": 8}) == ["two", "three", "one"]


def test_new_prefixes_go_to_the_least_busy_and_then_in_turn():
    known = PrefixMap()
    assert known.order((), {"one": 2, "two": 1}) == ["two", "one"]
    taken = []
    for number in range(6):
        keys = prefix_keys(bytes([number]) * 64)
        taken.append(known.order(keys, idle("one", "two", "three"))[0])
        known.add(keys, taken[-1])
    assert sorted(taken[:3]) == sorted(taken[3:]) == ["one", "three", "two"]


def test_the_map_is_bounded_and_forgets_the_oldest_from_their_ends():
    known = PrefixMap(max_blocks=4)
    old, new = prefix_keys(b"a" * 192), prefix_keys(b"b" * 192)
    known.add(old, "one")
    known.add(new, "two")
    assert len(known) == 4
    loads = idle("one", "two")
    known.add((), "one")  # so that "two" comes first where nothing is known
    known.add((), "one")
    assert known.order(old, loads)[0] == "one"  # its first block is left
    assert known.order(old[1:], loads)[0] == "two"


def test_replicas_that_are_gone_are_forgotten():
    known = PrefixMap()
    keys = prefix_keys(b"a" * 128)
    known.add(keys, "one")
    known.add(keys[:1], "two")
    known.keep(["two", "new"])
    assert len(known) == 1
    assert known.order(keys, idle("two", "new"))[0] == "two"
    known.keep(["new"])
    assert len(known) == 0 and known.order(keys, idle("new")) == ["new"]
    assert known.order(keys, {}) == []


def test_a_new_replica_does_not_get_all_requests_until_it_has_had_as_many():
    known = PrefixMap()
    for _ in range(10):
        known.add((), "one")
    known.keep(["one", "new"])
    known.add((), "new")
    assert known.order((), idle("one", "new"))[0] == "one"


@pytest.mark.parametrize(
    ("one", "other", "least"),
    [
        ({"prompt": COMMON + "a"}, {"prompt": COMMON + "b", "max_tokens": 3}, 3),
        ({"prompt": [COMMON, "c"]}, {"prompt": COMMON}, 3),
        ({"prompt": [*range(100)]}, {"prompt": [*range(100), 7]}, 6),
        ({"prompt": [[*range(100)]]}, {"prompt": [*range(100)]}, 6),
        ({"prefix": COMMON, "candidates": ["a"]}, {"prefix": COMMON, "candidates": ["b"]}, 3),
        (
            {"messages": [{"role": "user", "content": COMMON}]},
            {"messages": [{"role": "user", "content": COMMON}, {"role": "user", "content": "b"}]},
            3,
        ),
        ({"instructions": COMMON, "input": "a"}, {"instructions": COMMON, "input": "b"}, 3),
        ({"problem": COMMON + "a"}, {"problem": COMMON + "b", "names": ["A"]}, 3),
        ({"messages": ["a"], "tools": [COMMON]}, {"messages": ["b"], "tools": [COMMON]}, 3),
    ],
)
def test_requests_with_a_common_beginning_have_common_keys(one, other, least):
    assert common_blocks(posted(**one), posted(**other)) >= least


def test_other_tools_are_another_beginning():
    messages = [{"role": "user", "content": COMMON}]
    assert common_blocks(posted(messages=messages, tools=["a"]), posted(messages=messages)) == 0


@pytest.mark.parametrize(
    "body",
    [b"", b"{", b"[]", b"5", b"\xff", b"[" * 100_000, b'{"prompt": 5}', b'{"prompt": [1, -2, "a"]}',
     b'{"prompt": [4294967296]}', b'{"prompt": [true]}', b'{"prompt": []}', b'{"prompt": null}',
     b'{"previous_response_id": 5}', b'{"prompt": "\\ud800"}'],
)  # fmt: skip
def test_a_body_that_does_not_fit_has_no_beginning(body):
    assert route_of(ForwardedRequest("POST", "/v1/completions", body=body)) == Route()


@pytest.mark.parametrize(
    ("request_", "holder"),
    [
        (ForwardedRequest("GET", f"/v1/responses/{HELD}"), "ab12cd34"),
        (ForwardedRequest("POST", f"/v1/workers/{HELD.replace('resp_', 'session')}/say"), "ab12cd34"),
        (ForwardedRequest("GET", "/v1/responses/resp_" + "0" * 32), ""),
        (ForwardedRequest("GET", "/v1/engine/stats", b"stream=1&replica=ab12"), "ab12"),
        (ForwardedRequest("GET", "/v1/engine/stats", b"replica=../x"), ""),
        (ForwardedRequest("GET", "/v1/models", b"replica=ab12"), ""),
        (
            ForwardedRequest(
                "POST", "/v1/responses", body=json.dumps({"previous_response_id": HELD}).encode()
            ),
            "ab12cd34",
        ),
    ],
)  # fmt: skip
def test_what_a_replica_holds_is_asked_of_it(request_, holder):
    assert route_of(request_).holder == holder


@pytest.mark.parametrize("identity", [None, 5, "", "resp_", "resp_a-b", f"{HELD}0", HELD.upper()])
def test_other_identities_have_no_holder(identity):
    assert holder_of(identity) == ""
