"""/v1/trees: searches of agents, which their programs post while they grow, for the page to show."""

from collections.abc import Iterator
from typing import Annotated, Any, Literal

from fastapi import APIRouter, Request
from pydantic import BaseModel, ConfigDict, Field
from starlette.responses import Response

from jaxshare.serving.http.answers import json_response, owner_of
from jaxshare.serving.http.endpoints.tree_store import StoredTree, TreeStore
from jaxshare.serving.http.errors import bad_request
from jaxshare.serving.http.generation.fields import Body, Number

_MOST_NODES = 4096

router = APIRouter()

Identity = Annotated[str, Field(min_length=1, max_length=256)]
Words = Annotated[str, Field(max_length=2048)]
Path = Annotated[list[int], Field(max_length=1024)]


class ShownNode(BaseModel):
    """A node of a tree."""

    model_config = ConfigDict(extra="forbid", strict=True)

    id: Identity
    parent: Identity | None = None
    label: Words = ""
    score: Number | None = None
    fate: Annotated[str, Field(max_length=32)] = ""
    text: Words | None = None


class _SearchState(BaseModel):
    model_config = ConfigDict(extra="ignore", strict=True)

    path: Path
    parent: Path | None = None
    fate: Annotated[str, Field(max_length=32)]
    waits_for: Words
    line: int
    score: Number | None = None
    value: str | None = None


class _SearchRun(BaseModel):
    model_config = ConfigDict(extra="ignore", strict=True)

    id: Identity
    agent: Words
    parent: Identity | None = None
    value: str | None = None
    error: str | None = None
    states: list[_SearchState]


class SearchLogFields(BaseModel):
    """The JSON of `jaxshare.serving.agents.search_log.SearchLog`."""

    model_config = ConfigDict(extra="ignore", strict=True)

    format: Literal["jaxshare agents trace 1"]
    runs: list[_SearchRun]

    def nodes(self) -> Iterator[ShownNode]:
        """Yields a node for each run, and for each of its states below it."""
        known = {run.id for run in self.runs}
        for run in self.runs:
            text = run.value if run.error is None else run.error
            yield ShownNode(
                id=run.id,
                parent=run.parent if run.parent in known else None,
                label=run.agent,
                fate="failed" if run.error is not None else "",
                text=_short(text),
            )
            for state in run.states:
                yield ShownNode(
                    id=_state_id(run.id, state.path),
                    parent=run.id if state.parent is None else _state_id(run.id, state.parent),
                    label=f"{state.waits_for}, line {state.line}",
                    score=state.score,
                    fate=state.fate,
                    text=_short(state.value),
                )


class TreeFields(Body):
    """The body of POST /v1/trees, which has one of `nodes` and `log`."""

    name: Annotated[str, Field(min_length=1, max_length=64)]
    nodes: list[ShownNode] | None = None
    log: SearchLogFields | None = None


def _state_id(run: str, path: list[int]) -> str:
    return f"{run}/{'.'.join(map(str, path))}"[-256:]


def _short(text: str | None) -> str | None:
    return None if text is None else text[:2048]


def _store(request: Request) -> TreeStore:
    return request.app.state.trees


@router.post("/v1/trees", tags=["trees"])
async def post_tree(body: TreeFields, request: Request) -> Response:
    """Stores a tree under its name, in place of the one that it had before."""
    body.check_fields()
    if (body.nodes is None) == (body.log is None):
        raise bad_request("give one of nodes and log", "nodes")
    given = body.nodes if body.log is None else [*body.log.nodes()]
    nodes = _in_order(given or [])
    made = _store(request).put(owner_of(request), body.name, nodes)
    return json_response(_head(body.name, made))


@router.get("/v1/trees", tags=["trees"])
async def list_trees(request: Request) -> Response:
    """Lists the trees of this key, the newest one first."""
    trees = _store(request).names(owner_of(request))
    return json_response({"object": "list", "data": [_head(*each) for each in trees.items()]})


@router.get("/v1/trees/{name}", tags=["trees"])
async def retrieve_tree(name: str, request: Request) -> Response:
    """Gives a tree, parents before their children."""
    found = _store(request).get(owner_of(request), name)
    return json_response({**_head(name, found), "nodes": found.nodes})


@router.delete("/v1/trees/{name}", tags=["trees"])
async def delete_tree(name: str, request: Request) -> Response:
    """Forgets a tree."""
    _store(request).delete(owner_of(request), name)
    return json_response({"name": name, "object": "tree", "deleted": True})


def _head(name: str, tree: StoredTree) -> dict[str, Any]:
    return {"name": name, "object": "tree", "version": tree.version, "size": len(tree.nodes)}


def _in_order(nodes: list[ShownNode]) -> list[dict[str, Any]]:
    """The nodes as JSON, parents before their children.

    Raises:
      ApiError: there are too many, two have one id, or a parent is not there or a descendant.
    """
    if len(nodes) > _MOST_NODES:
        raise bad_request(
            f"the tree has {len(nodes)} nodes; {_MOST_NODES} are the most that are shown", "nodes"
        )
    by_id = {node.id: node for node in nodes}
    if len(by_id) < len(nodes):
        raise bad_request("two nodes of the tree have the same id; give each its own", "nodes")
    children: dict[str | None, list[ShownNode]] = {}
    for node in nodes:
        if node.parent is not None and node.parent not in by_id:
            raise bad_request(
                f"the node {node.id[:64]!r} has a parent that is not in the tree", "nodes"
            )
        children.setdefault(node.parent, []).append(node)
    ordered, next_ones = [], children.get(None, [])[::-1]
    while next_ones:
        node = next_ones.pop()
        ordered.append(node.model_dump())
        next_ones += children.get(node.id, [])[::-1]
    if len(ordered) < len(nodes):
        raise bad_request("some nodes of the tree are their own ancestors", "nodes")
    return ordered
