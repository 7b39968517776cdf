"""Containers of the local cluster: their inputs, the reasons why they do not start, and their logs."""

import json

import pytest

from kvpilot_localcluster.rest import ApiError, until
from support.tenants import Tenant, container, field


def test_an_unknown_image_waits_with_a_reason(tenant: Tenant) -> None:
    tenant.run("unknown", container(image="nowhere/nothing:1"))
    status = tenant.wait("unknown", lambda s: "Err" in s.get("state", {}).get("waiting", {}).get("reason", ""), "waits")
    assert "nowhere/nothing:1" in status["state"]["waiting"]["message"]
    assert tenant.pod("unknown")["status"]["phase"] == "Pending"


def test_a_command_that_does_not_exist_is_a_start_error(tenant: Tenant) -> None:
    tenant.run("typo", container(command=["no-such-program"]), restartPolicy="Never")
    end = tenant.wait("typo", lambda s: s.get("state", {}).get("terminated"), "ended")["state"]["terminated"]
    assert end["reason"] == "StartError"
    assert "no-such-program" in end["message"]


def test_variables_come_from_fields_secrets_configmaps_and_resources(tenant: Tenant) -> None:
    rest = tenant.cluster.rest
    rest.create(f"{tenant.core}/configmaps", {"metadata": {"name": "c"}, "data": {"COLOUR": "blue", "file": "content"}})
    rest.create(f"{tenant.core}/secrets", {"metadata": {"name": "s"}, "stringData": {"word": "hush"}})
    env = [
        {"name": "POD_IP", **field("status.podIP")},
        {"name": "APP", **field("metadata.labels['app']")},
        {"name": "WORD", "valueFrom": {"secretKeyRef": {"name": "s", "key": "word"}}},
        {"name": "MIB", "valueFrom": {"resourceFieldRef": {"resource": "limits.memory", "divisor": "1Mi"}}},
        {"name": "JOINED", "value": "$(WORD)-$(COLOUR)-$$(WORD)-$(NOBODY)"},
        {"name": "ABSENT", "valueFrom": {"configMapKeyRef": {"name": "c", "key": "no", "optional": True}}},
    ]
    script = "import json, os, pathlib; print(json.dumps([dict(os.environ), pathlib.Path('/conf/file').read_text()]))"
    tenant.run(
        "env",
        container(
            command=["python3", "-c"],
            args=[script],
            env=env,
            envFrom=[{"configMapRef": {"name": "c"}}],
            resources={"limits": {"memory": "64Mi"}},
            volumeMounts=[{"name": "conf", "mountPath": "/conf"}],
        ),
        labels={"app": "shown"},
        restartPolicy="Never",
        volumes=[{"name": "conf", "configMap": {"name": "c"}}],
    )
    tenant.wait("env", lambda s: s.get("state", {}).get("terminated"), "ended")
    shown, content = json.loads(tenant.log("env"))
    assert content == "content"
    assert shown["POD_IP"] == tenant.pod("env")["status"]["podIP"]
    assert (shown["APP"], shown["WORD"], shown["MIB"], shown["COLOUR"]) == ("shown", "hush", "64", "blue")
    assert shown["JOINED"] == "hush-blue-$(WORD)-$(NOBODY)"
    assert "ABSENT" not in shown


def test_a_container_waits_for_a_missing_configmap(tenant: Tenant) -> None:
    tenant.run("early", container(command=["sleep", "60"], envFrom=[{"configMapRef": {"name": "late"}}]))
    tenant.wait(
        "early", lambda s: s.get("state", {}).get("waiting", {}).get("reason") == "CreateContainerConfigError", "waits"
    )
    tenant.cluster.rest.create(f"{tenant.core}/configmaps", {"metadata": {"name": "late"}, "data": {"A": "b"}})
    tenant.wait_ready("early")
    tenant.delete("early", grace=1)


def test_the_end_of_a_failed_containers_log_is_in_its_status(tenant: Tenant) -> None:
    script = "for i in $(seq 200); do echo line $i; done; echo the reason >&2; exit 78"
    tenant.run(
        "words",
        container(command=["bash", "-c", script], terminationMessagePolicy="FallbackToLogsOnError"),
        restartPolicy="Never",
    )
    end = tenant.wait("words", lambda s: s.get("state", {}).get("terminated"), "ended")["state"]["terminated"]
    assert end["exitCode"] == 78
    assert end["reason"] == "Error"
    assert end["message"].endswith("the reason\n")
    assert len(end["message"].splitlines()) == 80
    assert tenant.pod("words")["status"]["phase"] == "Failed"


def test_a_termination_message_comes_from_the_file_and_a_finished_pod_succeeds(tenant: Tenant) -> None:
    tenant.run("file", container(command=["sh", "-c", "echo -n kept > /dev/termination-log"]), restartPolicy="Never")
    end = tenant.wait("file", lambda s: s.get("state", {}).get("terminated"), "ended")["state"]["terminated"]
    assert (end["exitCode"], end["reason"], end["message"]) == (0, "Completed", "kept")
    assert tenant.pod("file")["status"]["phase"] == "Succeeded"


def test_logs_are_read_through_the_api_server(tenant: Tenant) -> None:
    tenant.run("talks", container(command=["sh", "-c", "echo one; echo two; sleep 60"]))
    tenant.wait_ready("talks")
    path = f"{tenant.core}/pods/talks/log"
    assert until(lambda: tenant.cluster.rest.call("GET", path) == "one\ntwo\n", "both lines")
    assert tenant.cluster.rest.call("GET", f"{path}?tailLines=1") == "two\n"
    with pytest.raises(ApiError, match="no such log"):
        tenant.cluster.rest.call("GET", f"{path}?previous=true")
    tenant.delete("talks", grace=0)
