"""What is compiled before a request comes, no request waits for; and hosts share their programs."""

import collections
import concurrent.futures
import contextlib
import copy
import dataclasses

import jax
import pytest
from jax import monitoring

from jaxshare import Sampler
from jaxshare.serving import Workers, generate
from jaxshare.serving.engine import ClosedError, Engine
from tests.helpers import mostly_slow
from tests.helpers import one_layer as model

WARM = Sampler(temperature=0.9)
PROMPT = "1. 47 + 38\n2. 12 * 3"


@contextlib.contextmanager
def counted_compiles():
    """The programs that are asked of the compiler or of its cache meanwhile, by name."""
    count = collections.Counter()

    def listen(event, _, fun_name="", **__):
        if event == "/jax/core/compile/backend_compile_duration":
            count[fun_name] += 1

    monitoring.register_event_duration_secs_listener(listen)
    try:
        yield count
    finally:
        monitoring.unregister_event_duration_listener(listen)


@pytest.mark.parametrize("logits_cache", mostly_slow([0, 2**20]))
def test_after_a_warm_up_no_request_waits_for_the_compiler(logits_cache):
    resample = "stepwise" if logits_cache else None
    settings = dict(max_new_tokens=12, seed=1, resample=resample)
    with Engine(model(), logits_cache=logits_cache) as engine:
        assert engine.warm_up() > 0
        with counted_compiles() as compiled:
            first, again = (engine.submit(PROMPT, WARM, **settings).wait() for _ in range(2))
        assert first.tokens == again.tokens
        loop = {"jit(_decode)", "jit(_forward)", "jit(_admit)", "jit(verify)"}
        assert not (loop | {"jit(_row_of)", "jit(_stacked)"}) & {*compiled}
        with counted_compiles() as compiled:
            engine.warm_up()
        assert not compiled
    with pytest.raises(ClosedError):
        engine.warm_up()


@pytest.mark.slow
def test_a_session_generate_and_an_engine_share_their_programs():
    jax.clear_caches()
    with counted_compiles() as compiled:
        with Workers(model(), PROMPT, names=("Alice", "Bob"), budget=24, seed=1) as session:
            session.run()
            alone = session.finish(sees=session.layout.overview("Bob"))
        assert (compiled["jit(_decode)"], compiled["jit(_forward)"]) == (1, 1)
        generate(model(), [PROMPT] * 3, n=4, max_new_tokens=8, sampler=WARM)
        with Engine(model()) as engine:
            engine.submit(PROMPT * 9, WARM, max_new_tokens=8).wait()
            generate(model(), PROMPT, n=8, max_new_tokens=8, sampler=WARM, engine=engine)
            with Workers(
                model(), PROMPT, names=("Alice", "Bob"), budget=24, seed=1, engine=engine
            ) as session:
                session.run()
                assert session.finish(sees=session.layout.overview("Bob")) == alone
    assert (compiled["jit(_decode)"], compiled["jit(_forward)"]) == (2, 2)


@pytest.mark.slow
def test_sessions_that_begin_together_share_one_program():
    """They find the ends of steps with the same tables, whichever thread was first to ask for them,
    and the first one's groups serve the others, too."""

    def run(problem: str) -> None:
        names = ("Alice", "Bob", "Cara", "Dan")
        with Workers(tables_of_its_own, problem, names=names, budget=8, engine=engine) as session:
            session.run()

    # A tokenizer whose tables no test has asked for before.
    tables_of_its_own = dataclasses.replace(model(), tokenizer=copy.deepcopy(model().tokenizer))
    with Engine(tables_of_its_own, max_rows=32) as engine, counted_compiles() as compiled:
        run(PROMPT)
        with concurrent.futures.ThreadPoolExecutor(7) as threads:
            list(threads.map(run, [f"{n}. 47 + 3{n}" for n in range(1, 8)]))
    assert compiled["jit(_decode)"] == 1
