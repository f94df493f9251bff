"""Manifests for Kubernetes: KubeRay's part against its fields, pods against Kubernetes' schema."""

import copy
import json
import re
from pathlib import Path

import jsonschema
import kubernetes_validate
import pytest
import yaml

ROOT = Path(__file__).resolve().parents[2]
SCHEMA = json.loads((ROOT / "tests" / "schemas" / "ray.io_v1.json").read_text())
FOLDER = ROOT / "jobs" / "kubernetes"
QUEUE = FOLDER / "kueue-queue.yaml"
FILES = sorted(set(FOLDER.glob("*.yaml")) - {QUEUE})
PINS = (ROOT / "constraints.txt").read_text()  # of what the image is made with
KUBERNETES = kubernetes_validate.latest_version()


def load(path):
    return yaml.safe_load(path.read_text())


def cluster_of(manifest):
    spec = manifest["spec"]
    return spec.get("rayClusterSpec", spec)


def pods_of(manifest):
    spec = cluster_of(manifest)
    return [group["template"] for group in (spec["headGroupSpec"], *spec["workerGroupSpecs"])]


def validate(manifest):
    definition = {"$ref": f"#/definitions/{manifest['kind']}"}
    jsonschema.validate(manifest, {"definitions": SCHEMA["definitions"], **definition})
    for template in pods_of(manifest):
        pod = {"apiVersion": "v1", "kind": "Pod", "metadata": {"name": "pod"}, **template}
        kubernetes_validate.validate(pod, KUBERNETES, strict=True)


@pytest.mark.parametrize("path", FILES, ids=lambda path: path.name)
def test_a_manifest_fits_its_schema(path):
    validate(load(path))


def spoiled():
    """Manifests with one thing wrong each."""
    sound = load(FOLDER / "rayjob.yaml")

    def change(edit):
        manifest = copy.deepcopy(sound)
        edit(manifest["spec"])
        return manifest

    worker = lambda spec: spec["rayClusterSpec"]["workerGroupSpecs"][0]  # noqa: E731
    container = lambda spec: worker(spec)["template"]["spec"]["containers"][0]  # noqa: E731
    yield change(lambda spec: spec.update(entryPoint="x"))
    yield change(lambda spec: spec.update(backoffLimit="3"))
    yield change(lambda spec: spec["rayClusterSpec"]["authOptions"].update(mode="tokens"))
    yield change(lambda spec: worker(spec).pop("groupName"))
    yield change(lambda spec: worker(spec)["rayStartParams"].update({"num-cpus": 0}))
    yield change(lambda spec: container(spec).update(volumemounts=[]))
    yield change(lambda spec: container(spec).pop("name"))


@pytest.mark.parametrize("manifest", list(spoiled()))
def test_the_schemas_find_what_is_wrong(manifest):
    with pytest.raises((jsonschema.ValidationError, kubernetes_validate.ValidationError)):
        validate(manifest)


@pytest.mark.parametrize("path", FILES, ids=lambda path: path.name)
def test_a_cluster_asks_for_a_token_and_shares_store_and_memory(path):
    manifest = load(path)
    spec = cluster_of(manifest)
    assert spec["authOptions"] == {"mode": "token"}
    assert f"ray=={spec['rayVersion']}" in PINS.splitlines()
    assert spec["headGroupSpec"]["rayStartParams"]["num-cpus"] == "0"
    for template in pods_of(manifest):
        (container,) = template["spec"]["containers"]
        mounts = {mount["mountPath"]: mount["name"] for mount in container["volumeMounts"]}
        volumes = {volume["name"]: volume for volume in template["spec"]["volumes"]}
        assert volumes[mounts["/dev/shm"]]["emptyDir"]["medium"] == "Memory"
        assert "persistentVolumeClaim" in volumes[mounts["/store"]]
        assert container["resources"]["limits"] == container["resources"]["requests"]


def test_the_job_runs_a_recipe_on_the_same_cluster():
    cluster, job = (load(FOLDER / f"{name}.yaml") for name in ("raycluster", "rayjob"))
    assert job["spec"]["rayClusterSpec"] == cluster["spec"]
    command = job["spec"]["entrypoint"].split()
    assert command[:2] == ["python", "jobs/train.py"]
    store = command[command.index("--store") + 1]  # all else is gone with the pods
    for template in pods_of(job):
        (container,) = template["spec"]["containers"]
        mounts = {mount["mountPath"]: mount["name"] for mount in container["volumeMounts"]}
        assert mounts[store] == "store"


def test_the_job_in_a_queue_is_the_job_with_its_minimum_first():
    queued, job = (load(FOLDER / f"{name}.yaml") for name in ("rayjob-kueue", "rayjob"))
    metadata, cluster = queued["metadata"], cluster_of(queued)
    assert metadata.pop("annotations") == {"kueue.x-k8s.io/elastic-job": "true"}
    queue = metadata.pop("labels")["kueue.x-k8s.io/queue-name"]
    assert cluster.pop("enableInTreeAutoscaling") is True  # Kueue wants it of elastic Ray jobs
    (group,) = cluster["workerGroupSpecs"]
    assert group["replicas"] == group["minReplicas"]
    group["replicas"] = cluster_of(job)["workerGroupSpecs"][0]["replicas"]
    assert queued == job
    kinds = {part["kind"]: part for part in yaml.safe_load_all(QUEUE.read_text())}
    assert kinds["LocalQueue"]["metadata"]["name"] == queue
    assert kinds["LocalQueue"]["spec"]["clusterQueue"] == kinds["ClusterQueue"]["metadata"]["name"]


def test_the_queue_has_room_for_the_largest_job():
    cluster = cluster_of(load(FOLDER / "rayjob-kueue.yaml"))
    (group,) = cluster["workerGroupSpecs"]
    amount = lambda text: float(str(text).removesuffix("Gi"))  # noqa: E731

    def wanted(template, name):
        (container,) = template["spec"]["containers"]
        return amount(container["resources"]["requests"].get(name, 0))

    kinds = {part["kind"]: part for part in yaml.safe_load_all(QUEUE.read_text())}
    (resources,) = kinds["ClusterQueue"]["spec"]["resourceGroups"]
    (flavor,) = resources["flavors"]
    assert flavor["name"] == kinds["ResourceFlavor"]["metadata"]["name"]
    assert [each["name"] for each in flavor["resources"]] == resources["coveredResources"]
    for each in flavor["resources"]:
        head = wanted(cluster["headGroupSpec"]["template"], each["name"])
        worker = wanted(group["template"], each["name"])
        assert amount(each["nominalQuota"]) >= head + group["maxReplicas"] * worker


def test_the_image_of_the_manifests_is_what_the_dockerfile_makes():
    said = (ROOT / "Dockerfile").read_text()
    images = {
        container["image"]
        for path in FILES
        for template in pods_of(load(path))
        for container in template["spec"]["containers"]
    }
    assert all(f"docker build -t {image} ." in said for image in images)


def test_the_images_user_may_write_to_the_store():
    (user,) = re.findall(r"^USER (\d+)$", (ROOT / "Dockerfile").read_text(), re.MULTILINE)
    for path in FILES:
        for template in pods_of(load(path)):
            assert template["spec"]["securityContext"]["fsGroup"] == int(user)


def test_the_dockerfile_copies_what_may_be_copied():
    """Each path exists, and .dockerignore, which leaves out all else, lets it in."""
    copied = [
        word
        for line in (ROOT / "Dockerfile").read_text().splitlines()
        if line.startswith("COPY") and "--from" not in line
        for word in line.split()[1:-1]
        if not word.startswith("--")
    ]
    allowed = (ROOT / ".dockerignore").read_text().split()
    assert copied
    for path in copied:
        assert (ROOT / path).exists()
        assert f"!{path}" in allowed
