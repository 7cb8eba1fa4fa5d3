"""The images and manifests of deploy/: what they name exists, and what they say agrees."""

import argparse
import importlib.util
import json
import os
import re
import shlex
import signal
import subprocess
import sys
import tempfile
import textwrap
import tomllib
from pathlib import Path
from typing import Any

import jsonschema
import pytest
import yaml

from jaxshare.serving.cli import serve
from jaxshare.serving.cli.main import command_parser
from jaxshare.serving.http.auth import OPEN_PATHS
from tests.paths import ROOT
from tests.serving.http.served import ScriptedEngine, served, until

DEPLOY = ROOT / "deploy"
PROJECT = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]
TARGETS = ("cpu", "cuda13")
PORT, USER, LAST_SECONDS = 8000, 10001, 5
"""The last one: seconds in which a server ends after its grace."""
KEYS = "${CREDENTIALS_DIRECTORY}/keys"
"""The file of keys in the systemd unit."""


def instructions() -> list[tuple[str, str]]:
    """The instructions of the Dockerfile with their arguments, lines that go on put together."""
    text = (DEPLOY / "Dockerfile").read_text()
    lines = [line for line in text.splitlines() if not line.lstrip().startswith("#")]
    whole = re.sub(r"\\\n\s*", " ", "\n".join(lines))
    pairs = [line.split(None, 1) for line in whole.splitlines() if line.strip()]
    return [(name, rest.strip()) for name, rest in pairs]


def stages() -> dict[str, tuple[str, list[tuple[str, str]]]]:
    """The base of each stage, and its instructions."""
    arguments, found, name = {}, {}, ""
    for each, rest in instructions():
        if each == "FROM":
            base, name = re.fullmatch(r"(\S+) AS (\S+)", rest).groups()
            base = re.sub(r"\$\{(\w+)\}", lambda match: arguments[match[1]], base)
            found[name] = (base, [])
        elif not name:
            assert each == "ARG"
            arguments.update([rest.split("=")])
        else:
            found[name][1].append((each, rest))
    return found


def values(stage: str, name: str) -> list[str]:
    """The arguments of a stage's instructions of one kind."""
    return [rest for each, rest in stages()[stage][1] if each == name]


def parsed(arguments: list[str]) -> argparse.Namespace:
    """The options of a command, as `jaxshare serve` reads them."""
    parser = argparse.ArgumentParser(exit_on_error=False)
    serve.add_arguments(parser)
    with tempfile.NamedTemporaryFile("w") as keys:
        keys.write("secret\n")
        keys.flush()
        given = {"${MODEL:-embedded}": "tiny", KEYS: keys.name}
        options = parser.parse_args([given.get(each, each) for each in arguments])
        serve.settings_of(options)
    return options


def compose() -> dict[str, Any]:
    return yaml.safe_load((DEPLOY / "compose.yaml").read_text())


def manifest(kind: str) -> dict[str, Any]:
    documents = yaml.safe_load_all((DEPLOY / "kubernetes.yaml").read_text())
    (found,) = [each for each in documents if each["kind"] == kind]
    return found


def pod() -> dict[str, Any]:
    return manifest("Deployment")["spec"]["template"]["spec"]


def container() -> dict[str, Any]:
    (found,) = pod()["containers"]
    return found


def commands() -> dict[str, list[str]]:
    """The arguments of `jaxshare serve` in all files."""
    found = {f"image {name}": json.loads(values(name, "CMD")[0]) for name in TARGETS}
    found |= {f"service {name}": each["command"] for name, each in compose()["services"].items()}
    return {**found, "pod": container()["args"], "unit": unit_command()}


def unit() -> dict[str, list[str]]:
    """The settings of the systemd unit by section and name, each with its values."""
    text = (DEPLOY / "jaxshare.service").read_text().replace("\\\n", " ")
    found, section = {}, ""
    for line in text.splitlines():
        if line.startswith("["):
            section = line.strip("[]")
        elif line and not line.startswith("#"):
            name, _, value = line.partition("=")
            found.setdefault(f"{section}.{name}", []).append(value)
    return found


def unit_command() -> list[str]:
    """The arguments of `jaxshare serve` in the systemd unit."""
    (command,) = unit()["Service.ExecStart"]
    program, name, *arguments = command.replace("${MODEL}", "tiny").split()
    assert Path(program).name == "jaxshare" and name == "serve"
    return arguments


@pytest.mark.parametrize("place", [*commands()])
def test_options_are_those_of_the_command(place):
    options = parsed(commands()[place])
    host = "127.0.0.1" if place == "unit" else "0.0.0.0"
    assert (options.host, options.port) == (host, PORT)
    if not place.startswith("image"):  # the others have a volume for what stays
        folders = {Path(options.files_folder), Path(options.sessions_folder)}
        assert len(folders) == 2 and len({folder.parent for folder in folders}) == 1


@pytest.mark.parametrize("target", TARGETS)
def test_what_is_copied_exists_and_is_all_that_is_built_from(target):
    copied = {name for rest in values(f"build-{target}", "COPY") for name in rest.split()[:-1]}
    assert all((ROOT / name).exists() for name in copied)
    setuptools = tomllib.loads((ROOT / "pyproject.toml").read_text())["tool"]["setuptools"]
    folders = {*setuptools["package-dir"].values()}
    files = {"pyproject.toml", "setup.py", "README.md", *PROJECT["license-files"]}
    assert copied == files | folders
    kept = (ROOT / ".dockerignore").read_text().splitlines()
    assert {line[1:] for line in kept if line.startswith("!")} == copied and "*" in kept
    (source,) = values(target, "COPY")
    assert source == f"--from=build-{target} /opt/jaxshare /opt/jaxshare"


@pytest.mark.parametrize("target", TARGETS)
def test_extras_are_those_of_the_project(target):
    (default,) = [each.partition("=")[2] for each in values(f"build-{target}", "ARG")]
    (install,) = [each for each in values(f"build-{target}", "RUN") if "pip install" in each]
    extras = re.search(r'"\.\[(.*)\]"', install)[1].replace("${EXTRAS}", default).split(",")
    assert {*extras} <= {*PROJECT["optional-dependencies"]} and "serve" in extras
    text = (DEPLOY / "Dockerfile").read_text()
    others = re.search(r"^# EXTRAS=(\S+) ", text, re.MULTILINE)[1].split(",")
    assert {*others} <= {*PROJECT["optional-dependencies"]}


def test_versions_of_python_are_those_of_the_project():
    told = {each.rpartition(" ")[2] for each in PROJECT["classifiers"] if ":: 3." in each}
    base = stages()["cpu"][0]
    assert base == stages()["build-cpu"][0] and re.fullmatch(r"python:(.*)-slim", base)[1] in told
    base = stages()["cuda13"][0]
    assert base == stages()["build-cuda13"][0] and base.startswith("nvidia/cuda:13.")
    for name in ("cuda13", "build-cuda13"):
        used = set(re.findall(r"python(3\.\d+)", " ".join(values(name, "RUN"))))
        assert used and used <= told


@pytest.mark.parametrize("target", TARGETS)
def test_an_image_runs_as_a_user_without_rights_and_is_looked_after(target):
    assert values(target, "USER") == [f"{USER}:{USER}"]
    (made,) = [each for each in values(target, "RUN") if "useradd" in each]
    assert f"--uid {USER}" in made
    assert json.loads(values(target, "ENTRYPOINT")[0]) == ["jaxshare", "serve"]
    assert PROJECT["scripts"].keys() == {"jaxshare"}
    assert values(target, "EXPOSE") == [str(PORT)] and values(target, "STOPSIGNAL") == ["SIGTERM"]
    (check,) = values(target, "HEALTHCHECK")
    command = json.loads(check.partition("CMD ")[2])
    url = re.search(r"http://127\.0\.0\.1:(\d+)(/\w+)'", command[2])
    assert url and int(url[1]) == PORT and url[2] in OPEN_PATHS
    # The program of the health check runs, against a server of this test.
    with served(ScriptedEngine()) as made_server:
        port = made_server.url.rpartition(":")[2]
        exec(command[2].replace(str(PORT), port), {})


@pytest.mark.parametrize("name", TARGETS)
def test_a_service_is_built_here_and_ends_in_time(name):
    service = compose()["services"][name]
    build = service["build"]
    context = (DEPLOY / build["context"]).resolve()
    assert context == ROOT and (context / build["dockerfile"]) == DEPLOY / "Dockerfile"
    assert build["target"] == name and service["image"] == f"jaxshare:{name}"
    (port,) = service["ports"]
    assert port == f"127.0.0.1:{PORT}:{PORT}"
    assert serve.KEY_VARIABLE in service["environment"]
    seconds = int(service["stop_grace_period"].removesuffix("s"))
    assert seconds >= parsed(service["command"]).grace + LAST_SECONDS
    assert service["read_only"] and service["cap_drop"] == ["ALL"]
    assert {each.partition(":")[0] for each in service["volumes"]} == {*compose()["volumes"]}


def test_the_manifest_ends_its_server_in_time():
    spec, made = pod(), container()
    pause = made["lifecycle"]["preStop"]["sleep"]["seconds"]
    needed = pause + parsed(made["args"]).grace + LAST_SECONDS
    assert spec["terminationGracePeriodSeconds"] >= needed


def test_the_probes_ask_for_what_is_there():
    made = container()
    (port,) = made["ports"]
    assert port["containerPort"] == PORT
    probes = {name: each["httpGet"] for name, each in made.items() if name.endswith("Probe")}
    assert {name: probe["path"] for name, probe in probes.items()} == {
        "startupProbe": "/health",
        "livenessProbe": "/health",
        "readinessProbe": "/ready",
    }
    assert {probe["port"] for probe in probes.values()} == {port["name"]}
    assert {probe["path"] for probe in probes.values()} <= OPEN_PATHS
    with served(ScriptedEngine(), api_keys=("secret",)) as server:
        for probe in probes.values():
            assert server.http.get(probe["path"]).status_code == 200


def test_the_service_leads_to_the_pods():
    deployment, service = manifest("Deployment"), manifest("Service")
    labels = deployment["spec"]["template"]["metadata"]["labels"]
    assert deployment["spec"]["selector"]["matchLabels"] == labels
    assert service["spec"]["selector"] == labels
    (port,) = service["spec"]["ports"]
    assert port["targetPort"] == container()["ports"][0]["name"]


def test_the_pod_has_no_rights_and_all_the_folders_that_it_writes_to():
    spec, made = pod(), container()
    assert spec["securityContext"]["runAsNonRoot"]
    assert spec["securityContext"]["runAsUser"] == spec["securityContext"]["fsGroup"] == USER
    own = made["securityContext"]
    assert own["readOnlyRootFilesystem"] and not own["allowPrivilegeEscalation"]
    assert own["capabilities"] == {"drop": ["ALL"]}
    mounted = {each["name"]: each["mountPath"] for each in made["volumeMounts"]}
    assert {*mounted} == {each["name"] for each in spec["volumes"]}
    homes = [line for line in values("cpu", "ENV") if "HF_HOME" in line]
    assert f"HF_HOME={mounted['models']}" in shlex.split(homes[0])
    (home,) = values("cpu", "WORKDIR")
    assert mounted["cache"] == f"{home}/.cache"
    (variable,) = made["env"]
    assert variable["name"] == serve.KEY_VARIABLE
    assert {*variable["valueFrom"]} == {"secretKeyRef"}
    assert {*made["resources"]["requests"]} >= {"cpu", "memory"}


def test_the_unit_ends_its_server_in_time_and_lets_it_write_its_folders_alone():
    found, options = unit(), parsed(unit_command())
    (seconds,) = found["Service.TimeoutStopSec"]
    assert int(seconds) >= options.grace + LAST_SECONDS
    # The second signal, which the children of a group would pass on, ends a server at once.
    assert found["Service.KillMode"] == ["mixed"] and found["Service.DynamicUser"] == ["yes"]
    assert KEYS in unit_command() and found["Service.LoadCredential"] == ["keys:/etc/jaxshare/keys"]
    for folder in (options.files_folder, options.sessions_folder):
        assert folder.startswith("${STATE_DIRECTORY}/") and found["Service.StateDirectory"]
    assert "Service.MemoryDenyWriteExecute" not in found, "kernels are compiled at run time"
    assert found["Service.RestartPreventExitStatus"] == ["2"]


def test_state_that_one_server_has_is_on_volumes_and_ends_before_it_is_shared():
    deployment, (claim,) = (
        manifest("Deployment"),
        [
            each["persistentVolumeClaim"]["claimName"]
            for each in pod()["volumes"]
            if "persistentVolumeClaim" in each
        ],
    )
    assert claim == manifest("PersistentVolumeClaim")["metadata"]["name"]
    assert deployment["spec"]["strategy"] == {"type": "Recreate"}
    assert deployment["spec"]["replicas"] == 1
    for target in TARGETS:
        (made,) = [each for each in values(target, "RUN") if "mkdir" in each]
        for folder in (parsed(container()["args"]).files_folder, "/models"):
            parent = "/" + folder.split("/")[1]
            assert made.count(f" {parent} ") == 2, "it is made, and the user's"


def test_all_files_are_looked_at():
    named = {"Dockerfile", "compose.yaml", "grafana.json", "kubernetes.yaml"}
    named |= {"alerts.yaml", "jaxshare.service"}  # see test_monitoring.py and the test below
    named |= {"kubernetes-batch.yaml", "ray.yaml", *(script.name for script in SCRIPTS)}
    assert len(SCRIPTS) == 3
    assert {path.name for path in Path(DEPLOY).iterdir()} == named


SCRIPTS = sorted(DEPLOY.glob("*.sh"))
SBATCH = {
    *("job-name", "nodes", "ntasks", "ntasks-per-node", "cpus-per-task", "gpus-per-node"),
    *("time", "requeue", "open-mode", "signal", "exclusive"),
}
"""Options of sbatch that the scripts use, all of its manual."""
BATCH = ["embedded", "prompts.jsonl", "out.jsonl", "--n", "16"]


@pytest.mark.parametrize("script", SCRIPTS, ids=lambda path: path.name)
def test_a_script_has_no_faults_that_shellcheck_finds(script):
    program = Path(sys.executable).with_name("shellcheck")
    found = subprocess.run([program, script], capture_output=True, text=True)
    assert (found.returncode, found.stdout) == (0, "")


@pytest.mark.parametrize("script", SCRIPTS, ids=lambda path: path.name)
def test_options_of_a_job_come_before_its_first_command(script):
    """Where sbatch stops to read them, and are none that it does not know."""
    head, *rest = re.split(r"^(?!#|$).*$", script.read_text(), flags=re.MULTILINE)
    assert not any("#SBATCH" in part for part in rest)
    options = re.findall(r"^#SBATCH --([a-z-]+)(?:=\S+)?$", head, re.MULTILINE)
    assert {*options} <= SBATCH and len(options) == head.count("\n#SBATCH") and "time" in options
    example = re.search(rf"^#     sbatch deploy/{script.name} (.*)$", head, re.MULTILINE)
    assert example, "the script shows how it is submitted"


def run_job(
    script: str, arguments: list[str], folder: Path, *, is_late: bool = False, least: int = 0
) -> tuple[int, list[list[str]]]:
    """Runs a job of SLURM with programs in the places of its commands.

    Args:
      script, arguments: of the job.
      folder: for the programs.
      is_late: jaxshare goes on until the signal comes that SLURM sends before the end of the time.
      least: commands that there are at least; those in the background may come after its end.

    Returns:
      its exit code, and the commands that were run on nodes, each after the name of its node.
    """
    log = folder / "log"
    stubs = {
        "srun": """
            node=
            while [[ "$1" == --* ]]; do
              if [[ "$1" == --nodelist=* ]]; then node=${1#*=}; fi
              shift
            done
            if [[ "$1" == hostname ]]; then echo "10.0.0.1 10.0.0.2"; exit; fi
            printf '%s\\n' "$node $*" >> "$LOG"
            if [[ "$1" == jaxshare && -n "$LATE" ]]; then sleep 60; fi
        """,
        "scontrol": """
            if [[ "$1" == requeue ]]; then printf '%s\\n' "- scontrol $*" >> "$LOG"; fi
            if [[ "$1" == show ]]; then printf '%s\\n' n1 n2 n3; fi
        """,
    }
    for name, text in stubs.items():
        (folder / name).write_text(f"#!/usr/bin/env bash\n{textwrap.dedent(text)}")
        (folder / name).chmod(0o755)
    given = {
        "LOG": str(log),
        "LATE": "1" * is_late,
        "SLURM_JOB_ID": "7",
        "SLURM_JOB_NODELIST": "n[1-3]",
    }
    environment = {**os.environ, **given, "PATH": f"{folder}:{os.environ['PATH']}"}
    with subprocess.Popen(["bash", DEPLOY / script, *arguments], env=environment) as process:
        if is_late:
            until(log.exists)
            process.send_signal(signal.SIGUSR1)
        code = process.wait(30)

    def lines() -> list[str]:
        return log.read_text().splitlines() if log.exists() else []

    until(lambda: len(lines()) >= least)
    return code, [line.split(" ") for line in lines()]


def test_a_batch_job_resumes_what_is_there(tmp_path):
    code, [[_, program, *arguments]] = run_job("slurm-batch.sh", BATCH, tmp_path)
    options = command_parser().parse_args(arguments)
    assert code == 0 and program == "jaxshare" and arguments[0] == "batch"
    assert (options.model, options.input, options.output) == (*BATCH[:3],)
    assert options.resume and options.n == 16


def test_a_batch_job_is_queued_again_before_its_time_ends(tmp_path):
    code, commands = run_job("slurm-batch.sh", BATCH, tmp_path, is_late=True)
    assert code == 0 and commands[1:] == [["-", "scontrol", "requeue", "7"]]


@pytest.mark.parametrize("script", SCRIPTS, ids=lambda path: path.name)
def test_a_job_without_arguments_says_what_it_takes(script, tmp_path):
    assert run_job(script.name, [], tmp_path) == (1, [])


def test_a_model_on_several_nodes_is_one_command_of_all_processes(tmp_path):
    example = ["generate", "embedded", "--prompt", "a", "--expert", "16"]
    code, [[_, program, *arguments]] = run_job("slurm-mesh.sh", example, tmp_path)
    assert (
        code == 0 and program == "jaxshare" and command_parser().parse_args(arguments).distributed
    )


def test_a_cluster_of_a_job_has_all_its_nodes_and_one_head(tmp_path):
    given = ["batch", "embedded", "--input", "p", "--output", "o"]
    code, commands = run_job("slurm-ray.sh", given, tmp_path, least=5)
    assert code == 0
    heads = [each for each in commands if "--head" in each]
    assert [each[0] for each in heads] == ["n1"]
    assert {"--node-ip-address=10.0.0.1", "--port=6379", "--block"} <= {*heads[0]}
    joined = [
        each[0] for each in commands if "--address=10.0.0.1:6379" in each and "--block" in each
    ]
    assert sorted(joined) == ["n2", "n3"]
    (node, program, *arguments), *_ = [each for each in commands if each[1] == "jaxshare"]
    assert (node, program) == ("n1", "jaxshare")
    assert command_parser().parse_args(arguments).ray == "10.0.0.1:6379"


def test_the_cluster_of_ray_is_one_that_ray_takes():
    cluster = yaml.safe_load((DEPLOY / "ray.yaml").read_text())
    root = Path(importlib.util.find_spec("ray").origin).parent
    schema = json.loads((root / "autoscaler" / "ray-schema.json").read_text())
    jsonschema.validate(cluster, schema)
    assert cluster["max_workers"] == len(cluster["provider"]["worker_ips"])
    source, extras = re.search(
        r"pip install ~/'(.*)\[(.*)\]'", str(cluster["setup_commands"])
    ).groups()
    assert {*extras.split(",")} <= {*PROJECT["optional-dependencies"]}
    # What is mounted is what a wheel is built from, as in the images, and the cluster's token.
    token = "~/.ray/auth_token"
    built = {name for rest in values("build-cpu", "COPY") for name in rest.split()[:-1]}
    mounts = {f"~/{source}/{name}": name for name in built} | {token: token}
    assert cluster["file_mounts"] == mounts and all((ROOT / name).exists() for name in built)


def test_the_cluster_of_ray_has_a_token_and_its_server_keys():
    text = (DEPLOY / "ray.yaml").read_text()
    cluster = yaml.safe_load(text)
    started = cluster["head_start_ray_commands"] + cluster["worker_start_ray_commands"]
    starts = [each for each in started if "ray start" in each]
    assert len(starts) == 2 and all(each.startswith("RAY_AUTH_MODE=token ray ") for each in starts)
    assert "RAY_AUTH_MODE=token" in cluster["setup_commands"][-1]
    shown = re.search(r"ray exec deploy/ray.yaml '(.*)'", text)[1]
    options = command_parser().parse_args(shlex.split(shown)[1:])
    assert options.ray == "auto" and options.replicas == 16 and options.host == "0.0.0.0"
    copied = re.search(r"ray rsync-up deploy/ray.yaml (\S+) (\S+)", text)
    assert copied[1] == copied[2] == options.api_key_file
    assert shown in (ROOT / "docs" / "operations.md").read_text()


def test_a_batch_in_a_cluster_goes_on_in_another_pod():
    job = yaml.safe_load((DEPLOY / "kubernetes-batch.yaml").read_text())
    assert (job["apiVersion"], job["kind"]) == ("batch/v1", "Job")
    spec = job["spec"]["template"]["spec"]
    (made,) = spec["containers"]
    assert made["command"] == ["jaxshare", "batch"], "the image's own entry point is a server"
    options = command_parser().parse_args([*made["command"][1:], *made["args"]])
    assert options.resume and job["spec"]["backoffLimit"] > 0
    # A policy of failures takes no other one.
    assert spec["restartPolicy"] == "Never"
    ignored, failed = job["spec"]["podFailurePolicy"]["rules"]
    assert ignored["action"] == "Ignore" and failed["action"] == "FailJob"
    codes = {"containerName": made["name"], "operator": "In", "values": [2, 3]}
    assert failed["onExitCodes"] == codes  # see test_batch.py for what ends with them
    assert job["spec"]["template"]["metadata"]["labels"] == job["metadata"]["labels"]
    mounted = {each["name"]: each["mountPath"] for each in made["volumeMounts"]}
    assert {*mounted} == {each["name"] for each in spec["volumes"]}
    (data,) = [each for each in spec["volumes"] if each["name"] == "data"]
    assert {*data} == {"name", "persistentVolumeClaim"}
    assert {Path(options.input).parent, Path(options.output).parent} == {Path(mounted["data"])}
    server, others = pod(), container()
    assert spec["securityContext"] == server["securityContext"]
    assert made["securityContext"] == others["securityContext"] and made["image"] == others["image"]
    del mounted["data"]
    shared = {each["name"]: each["mountPath"] for each in others["volumeMounts"]}
    del shared["state"]
    assert mounted == shared
