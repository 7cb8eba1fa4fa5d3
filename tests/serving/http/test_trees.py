"""/v1/trees: what is posted comes back in order, to its owner alone, and what is no tree is refused."""

import pytest

from jaxshare.serving.agents.search_log import LoggedRun, LoggedState, SearchLog
from tests.serving.http.served import ScriptedEngine, served

NODES = [
    {"id": "c", "parent": "b", "label": "third", "score": 0.5, "fate": "pruned"},
    {"id": "a", "label": "first", "text": "<script>alert(1)</script>"},
    {"id": "b", "parent": "a", "label": "second", "score": -1.5, "fate": "accepted"},
]
LOG = {
    "format": "jaxshare agents trace 1",
    "runs": [
        {
            "id": "r0",
            "agent": "solve",
            "supervisor": "BeamSearch",
            "parent": None,
            "value": "'42'",
            "error": None,
            "states": [
                {
                    "path": path,
                    "parent": path[:-1] if path else None,
                    "fate": fate,
                    "waits_for": "llm",
                    "line": 7,
                    "score": score,
                    "value": None,
                }
                for path, fate, score in (
                    ([], "accepted", None),
                    ([0], "accepted", 0.75),
                    ([1], "pruned", 0.25),
                )
            ],
        }
    ],
}


@pytest.fixture(scope="module")
def server():
    with served(ScriptedEngine()) as made:
        yield made


def names(server, **more):
    return [each["name"] for each in server.http.get("/v1/trees", **more).json()["data"]]


def test_parents_come_before_their_children_and_all_is_kept(server):
    head = server.post("/v1/trees", {"name": "one", "nodes": NODES}).json()
    assert head == {"name": "one", "object": "tree", "version": 1, "size": 3}
    told = server.http.get("/v1/trees/one").json()
    assert [node["id"] for node in told["nodes"]] == ["a", "b", "c"]
    assert told["nodes"][0]["text"] == NODES[1]["text"]
    assert [node["score"] for node in told["nodes"]] == [None, -1.5, 0.5]
    assert server.post("/v1/trees", {"name": "one", "nodes": []}).json()["version"] == 2
    assert server.http.get("/v1/trees/one").json()["nodes"] == []
    assert server.http.delete("/v1/trees/one").json()["deleted"]
    assert server.http.get("/v1/trees/one").status_code == 404


def test_a_log_of_agents_is_a_tree_of_its_states(server):
    server.post("/v1/trees", {"name": "search", "log": LOG})
    nodes = server.http.get("/v1/trees/search").json()["nodes"]
    assert [(node["parent"], node["fate"], node["score"]) for node in nodes] == [
        (None, "", None),
        ("r0", "accepted", None),
        ("r0/", "accepted", 0.75),
        ("r0/", "pruned", 0.25),
    ]
    assert nodes[0]["label"] == "solve" and nodes[0]["text"] == "'42'"


def test_the_json_of_a_search_log_is_taken(server):
    first = LoggedState((), None, "kept", "llm", 3, None, 2, None, 0.0, 0.1)
    end = LoggedState((1,), (), "accepted", "end", 9, 2.5, 0, "'<b>'", 0.1, 0.2)
    runs = [
        LoggedRun("r7", "outer", "Greedy", None, 0.0, 0.2, 1, 5, 9, "'<b>'", None, (first, end)),
        LoggedRun("r8", "inner", "Greedy", "r7", 0.0, 0.2, 1, 5, 9, None, "ValueError", ()),
    ]
    head = server.post("/v1/trees", {"name": "own", "log": SearchLog(tuple(runs)).to_json()})
    assert head.status_code == 200 and head.json()["size"] == 4
    nodes = {node["id"]: node for node in server.http.get("/v1/trees/own").json()["nodes"]}
    assert nodes["r8"]["parent"] == "r7" and nodes["r8"]["fate"] == "failed"
    assert nodes["r7/1"]["parent"] == "r7/" and nodes["r7/1"]["text"] == "'<b>'"


@pytest.mark.parametrize(
    ("body", "words"),
    [
        ({"nodes": [{"id": "a"}, {"id": "a"}]}, "same id"),
        ({"nodes": [{"id": "a", "parent": "b"}]}, "not in the tree"),
        ({"nodes": [{"id": "a", "parent": "b"}, {"id": "b", "parent": "a"}]}, "ancestors"),
        ({"nodes": [{"id": str(i)} for i in range(4097)]}, "4096"),
        ({"nodes": [{"id": "a", "score": "high"}]}, "score"),
        ({"nodes": [{"id": "a", "colour": "red"}]}, "colour"),
        ({"log": {**LOG, "format": "another"}}, "format"),
        ({}, "one of nodes and log"),
        ({"nodes": [], "log": LOG}, "one of nodes and log"),
    ],
    ids=lambda value: value if isinstance(value, str) else "",
)
def test_what_is_no_tree_is_refused(server, body, words):
    answer = server.post("/v1/trees", {"name": "wrong", **body})
    assert answer.status_code == 400 and words in answer.text, answer.text
    assert "wrong" not in names(server)


def test_keys_see_their_own_trees_and_the_oldest_leave():
    with served(ScriptedEngine(), api_keys=("one", "two")) as made:
        one, two = ({"headers": {"Authorization": f"Bearer {key}"}} for key in ("one", "two"))
        made.post("/v1/trees", {"name": "mine", "nodes": NODES}, **one)
        assert names(made, **one) == ["mine"] and names(made, **two) == []
        assert made.http.get("/v1/trees/mine", **two).status_code == 404
        assert made.http.delete("/v1/trees/mine", **two).status_code == 404
        for i in range(64):
            made.post("/v1/trees", {"name": f"t{i}", "nodes": []}, **two)
        assert names(made, **one) == [] and names(made, **two)[0] == "t63"
        assert len(names(made, **two)) == 64
