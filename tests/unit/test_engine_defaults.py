"""The installation has defaults for engines, and a service's own values replace them."""

from dataclasses import replace
from typing import Any

import pytest

from kvpilot_operator.api.engine_defaults import EngineDefaults
from kvpilot_operator.api.faults import faults
from kvpilot_operator.decide import decide
from kvpilot_operator.observe.informers import InformerCache
from kvpilot_operator.options import parse_arguments
from kvpilot_operator.render.engine import pod_template
from kvpilot_operator.state.objects import DeploymentView
from support.services import KEY, manifest, revision_of, running

GPU: dict[str, str | int] = {"key": "nvidia.com/gpu", "operator": "Exists"}
DEFAULTS = EngineDefaults("team/runtime:2", [{"name": "registry"}], [GPU])


def rendered(engine: dict[str, Any], defaults: EngineDefaults = DEFAULTS) -> dict[str, Any]:
    """Return the pod spec that an operator with these defaults renders for a service with this `engine`."""
    cache = InformerCache(None, (), engines=defaults)  # type: ignore[arg-type]  # nothing is watched
    obj = manifest()
    obj["spec"]["engine"] = engine
    obj["metadata"] |= {"resourceVersion": "1", "generation": 1}
    cache.services.put(obj)
    (view,) = (cache.services.get(obj["metadata"]["namespace"], obj["metadata"]["name"]),)
    assert view is not None
    assert view.faults == ()
    assert view.spec is not None
    return pod_template(KEY.name, view.spec, "auto")["spec"]


def test_a_service_without_its_own_values_gets_the_installations_image_pull_secrets_and_tolerations() -> None:
    pod = rendered({"podTemplate": {"spec": {"nodeSelector": {"zone": "a"}}}})
    assert pod["containers"][0]["image"] == "team/runtime:2"
    assert pod["imagePullSecrets"] == [{"name": "registry"}]
    assert pod["tolerations"] == [{"key": "nvidia.com/gpu", "operator": "Exists"}]
    assert pod["nodeSelector"] == {"zone": "a"}


def test_a_services_own_values_replace_the_installations_defaults() -> None:
    own = {"imagePullSecrets": [{"name": "mine"}], "tolerations": []}
    pod = rendered({"image": "my/runtime:1", "podTemplate": {"spec": own}})
    assert pod["containers"][0]["image"] == "my/runtime:1"
    assert pod["imagePullSecrets"] == [{"name": "mine"}]
    assert not pod.get("tolerations")


def test_a_service_without_an_image_is_refused_if_the_installation_has_none() -> None:
    obj = manifest()
    obj["spec"]["engine"] = {}
    ((field, message),) = faults(obj)
    assert field == "spec.engine.image"
    assert "engines.image of kvpilot's chart" in message


@pytest.mark.parametrize(
    ("text", "named"),
    [("{", "engines.*"), ('{"image": 1}', "image"), ('{"tolerations": ["a"]}', "tolerations"),
     ('{"imagePullSecrets": ["a"]}', "imagePullSecrets"), ('{"nodeSelector": {}}', "nodeSelector")],
)  # fmt: skip
def test_wrong_defaults_end_the_operator_with_the_name_of_the_value(
    text: str, named: str, capsys: pytest.CaptureFixture[str]
) -> None:
    with pytest.raises(SystemExit):
        parse_arguments([f"--engine-defaults={text}"])
    assert named in capsys.readouterr().err


def test_with_a_default_image_the_status_names_the_serving_image() -> None:
    obj = manifest()
    name = revision_of(obj, "auto")
    views = {name: replace(DeploymentView(name, "auto", 1), image="team/runtime:2")}
    for given, told in ((True, "auto serves with team/runtime:2"), (False, "auto serves")):
        found = decide(running(obj, "auto", deployments=views, engine_defaults=given)).status.condition("Serving")
        assert found is not None
        assert found.message == told
