"""model.adapters: the LoRA adapters that engines load, and their names in the status."""

from dataclasses import replace
from typing import Any

from kvpilot_operator.api.faults import faults
from kvpilot_operator.decide import decide
from kvpilot_operator.observe.views import deployment_view
from kvpilot_operator.render.engine import pod_template, revision
from kvpilot_operator.render.objects import workload
from kvpilot_operator.state.status import Stable, Status
from support.services import KEY, NOW, manifest, revision_of, running, spec_of

SQL = {"name": "sql", "source": "pvc://adapters.shared/team/sql"}
CHAT = {"name": "acme/chat", "source": "pvc://private"}
BAKED = {"name": "baked", "source": "file:///opt/adapter"}


def service(*adapters: dict[str, str], **engine: Any) -> dict[str, Any]:
    return manifest(model={"source": "pvc://weights/llama", "adapters": list(adapters)}, engine=engine)


def template(*adapters: dict[str, str], **engine: Any) -> dict[str, Any]:
    obj = service(*adapters, **engine)
    assert faults(obj) == ()
    return pod_template(KEY.name, spec_of(obj), "k4v4")


def test_an_engine_has_every_adapter_as_argument_and_mounts_its_claim() -> None:
    pod = template(SQL, CHAT, BAKED, extraArgs=["--max-lora-rank=64"])["spec"]
    (engine,) = pod["containers"]
    begin = engine["args"].index("--lora-modules")
    assert engine["args"][begin:] == [
        "--lora-modules", "sql=/adapters/adapters.shared/team/sql", "acme/chat=/adapters/private",
        "baked=/opt/adapter", "--enable-lora", "--max-loras=3", "--max-lora-rank=64",
    ]  # fmt: skip
    claims = {one["name"]: one["persistentVolumeClaim"]["claimName"] for one in pod["volumes"][1:]}
    assert claims == {"model": "weights", "adapters-0": "adapters.shared", "adapters-1": "private"}
    mounts = {one["name"]: (one["mountPath"], one.get("readOnly")) for one in engine["volumeMounts"]}
    assert mounts["adapters-0"] == ("/adapters/adapters.shared", True)
    assert mounts["adapters-1"] == ("/adapters/private", True)


def test_a_claim_of_several_adapters_is_mounted_once() -> None:
    pod = template(SQL, {"name": "b", "source": "pvc://adapters.shared/b"})["spec"]
    assert [one["name"] for one in pod["volumes"]] == ["shm", "model", "adapters-0"]


def test_an_engine_gets_the_hubs_own_name_of_an_adapter() -> None:
    obj = manifest(model={"adapters": [{"name": "sql", "source": "hf://org/sql"}]})
    assert faults(obj) == ()
    arguments = pod_template(KEY.name, spec_of(obj), "auto")["spec"]["containers"][0]["args"]
    assert "sql=org/sql" in arguments


def test_a_change_of_adapters_makes_a_new_revision_and_their_removal_restores_the_old_one() -> None:
    none = manifest(model={"source": "pvc://weights/llama"})
    assert template() == pod_template(KEY.name, spec_of(none), "k4v4")
    assert len({revision(one) for one in (template(), template(SQL), template(SQL, CHAT))}) == 3


def test_the_status_names_the_adapters_that_the_serving_revision_has_loaded() -> None:
    before, after = service(SQL, CHAT), service(SQL)
    name = revision_of(before, "auto")
    made = workload(KEY, "u-1", pod_template(KEY.name, spec_of(before), "auto"), 1, 600)
    for ever_ready, told in ((True, ("sql", "acme/chat")), (False, ())):
        status = Status(stable=Stable(revision=name, dtype="auto", ever_ready=ever_ready, since=NOW))
        # The newest spec removes an adapter, but no engine serves that spec yet.
        observed = running(after, "auto", deployments={name: deployment_view(made)}, pods=())
        assert decide(replace(observed, status=status)).status.adapters == told
