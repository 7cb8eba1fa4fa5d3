"""The process that renders chat templates.

It is separate because a template is a program from a checkpoint, and may take all time and all
memory. Run by `chat_rendering.render`. Reads JSON lines {"template", "variables"}, and answers each
with {"text"} or {"error"}. Imports nothing of jaxshare, so that it starts quickly.

Templates see what transformers gives them (`apply_chat_template`): its filters, its functions, and
its extensions of Jinja.
"""

import contextlib
import datetime
import functools
import json
import resource
import sys


def main() -> None:
    limit, max_characters = int(sys.argv[1]), int(sys.argv[2])
    with contextlib.suppress(ValueError, OSError):  # some systems have no such limit
        resource.setrlimit(resource.RLIMIT_AS, (limit, limit))
    sys.path[:0] = sys.argv[3:]
    replies, sys.stdout = sys.stdout, sys.stderr
    for line in sys.stdin:
        try:
            reply = {"text": _render(json.loads(line), max_characters)}
        except MemoryError:
            reply = {"error": f"it takes more than {limit >> 20} MiB of memory"}
        except RecursionError:
            reply = {"error": "it calls itself too often"}
        except Exception as error:  # a template is a program and may raise anything
            reply = {"error": str(error).strip() or type(error).__name__}
        print(json.dumps(reply), file=replies, flush=True)


def _render(request, max_characters):
    pieces, length = [], 0
    for piece in _compiled(request["template"]).generate(**request["variables"]):
        length += len(piece)
        if length > max_characters:
            raise ValueError(f"it writes more than {max_characters:,} characters")
        pieces.append(piece)
    return "".join(pieces)


@functools.lru_cache(maxsize=8)
def _compiled(template):
    import jinja2
    import jinja2.ext
    import jinja2.nodes
    import jinja2.sandbox

    def raise_exception(message):
        raise jinja2.TemplateError(message)

    def tojson(value, ensure_ascii=False, indent=None, separators=None, sort_keys=False):
        # Jinja's own escapes characters of HTML.
        return json.dumps(
            value,
            ensure_ascii=ensure_ascii,
            indent=indent,
            separators=separators,
            sort_keys=sort_keys,
        )

    def strftime_now(format):
        return datetime.datetime.now().strftime(format)

    class GenerationBlock(jinja2.ext.Extension):
        """{% generation %}, which marks the assistant's words for training; nothing here."""

        tags = {"generation"}  # noqa: RUF012, Jinja's own attribute

        def parse(self, parser):
            line = next(parser.stream).lineno
            body = parser.parse_statements(("name:endgeneration",), drop_needle=True)
            call = self.call_method("_generation")
            return jinja2.nodes.CallBlock(call, [], [], body).set_lineno(line)

        def _generation(self, caller):
            return caller()

    environment = jinja2.sandbox.ImmutableSandboxedEnvironment(
        trim_blocks=True, lstrip_blocks=True, extensions=[GenerationBlock, jinja2.ext.loopcontrols]
    )
    environment.filters["tojson"] = tojson
    environment.globals |= {"raise_exception": raise_exception, "strftime_now": strftime_now}
    return environment.from_string(template)


if __name__ == "__main__":
    main()
