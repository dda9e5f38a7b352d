"""What Kubernetes, Kubeflow and SkyPilot take of the fields that our files use; a field that is not here is a typo.

Derived from the resource definitions of training-operator 1.9, trainer 2.3 and JobSet 0.12, batch/v1, SkyPilot 0.14.
"""

from typing import Any

TEXT = {"type": "string", "minLength": 1}
COUNT = {"type": "integer", "minimum": 1}
SECONDS = {"type": "integer", "minimum": 0}
QUANTITY = {"anyOf": [{"type": "integer"}, {"type": "string", "pattern": r"^\d+(Ki|Mi|Gi|Ti|m)?$"}]}
RESOURCES = {"type": "object", "additionalProperties": QUANTITY}
LABELS = {"type": "object", "additionalProperties": TEXT}
NAME = {"type": "string", "pattern": r"^[a-z]([-a-z0-9]*[a-z0-9])?$", "maxLength": 63}  # DNS-1035


def fields(required: str = "", **properties: Any) -> dict[str, Any]:
    """An object with these fields and no others."""
    return {
        "type": "object", "properties": properties, "required": required.split(), "additionalProperties": False,
    }  # fmt: skip


def each(item: dict[str, Any]) -> dict[str, Any]:
    return {"type": "array", "items": item, "minItems": 1}


ENV = each(
    {
        "oneOf": [
            fields("name value", name=TEXT, value={"type": "string"}),  # a number must be quoted
            fields(
                "name valueFrom",
                name=TEXT,
                valueFrom=fields(
                    "secretKeyRef", secretKeyRef=fields("name key", name=TEXT, key=TEXT, optional={"type": "boolean"})
                ),
            ),
        ]
    }
)
POD_RESOURCES = fields(requests=RESOURCES, limits=RESOURCES)
METADATA = fields("name", name=NAME, labels=LABELS)


def pod(container: str, restart_policy: bool) -> dict[str, Any]:
    """
    Args:
        container: the name that the operator looks for.
        restart_policy: whether the pod says it, or the operator does.
    """
    containers = each(
        fields(
            "name image command",
            name={"const": container},
            image={"type": "string", "pattern": r"^[\w./-]+:[\w.-]+$"},
            command=each(TEXT),
            args=each(TEXT),
            env=ENV,
            ports=each(fields("containerPort", containerPort=COUNT, name={"type": "string", "maxLength": 15})),
            resources=POD_RESOURCES,
            volumeMounts=each(fields("name mountPath", name=TEXT, mountPath=TEXT)),
        )
    )
    memory = fields("medium", medium={"const": "Memory"}, sizeLimit=QUANTITY)
    volumes = each({
        "oneOf": [
            fields("name persistentVolumeClaim", name=TEXT, persistentVolumeClaim=fields("claimName", claimName=TEXT)),
            fields("name emptyDir", name=TEXT, emptyDir=memory),
        ]
    })  # fmt: skip
    term = fields("topologyKey", topologyKey=TEXT, labelSelector=fields("matchLabels", matchLabels=LABELS))
    spec = fields(
        "containers volumes terminationGracePeriodSeconds" + (" restartPolicy" if restart_policy else ""),
        terminationGracePeriodSeconds=SECONDS,
        affinity=fields(podAntiAffinity=fields(requiredDuringSchedulingIgnoredDuringExecution=each(term))),
        containers=containers,
        volumes=volumes,
        **({"restartPolicy": {"const": "Never"}} if restart_policy else {}),
    )
    return fields("spec", metadata=fields(labels=LABELS), spec=spec)


PYTORCHJOB = fields(
    "apiVersion kind metadata spec",
    apiVersion={"const": "kubeflow.org/v1"},
    kind={"const": "PyTorchJob"},
    metadata=METADATA,
    spec=fields(
        "pytorchReplicaSpecs",
        runPolicy=fields(cleanPodPolicy={"enum": ["All", "Running", "None"]}, ttlSecondsAfterFinished=SECONDS),
        elasticPolicy=fields(
            rdzvBackend={"enum": ["c10d", "etcd", "etcd-v2"]}, rdzvId=TEXT, rdzvPort=COUNT, minReplicas=COUNT,
            maxReplicas=COUNT, maxRestarts=SECONDS,
        ),
        pytorchReplicaSpecs=fields(
            "Worker",
            Worker=fields(
                "replicas restartPolicy template",
                replicas=COUNT,
                restartPolicy={"enum": ["Always", "OnFailure", "Never", "ExitCode"]},
                template=pod("pytorch", restart_policy=False),
            ),
        ),
    ),
)  # fmt: skip
ON_EXIT_CODES = fields(
    "operator values", containerName=TEXT, operator={"const": "In"}, values=each({"type": "integer"})
)
ON_CONDITIONS = each(fields("type", type=TEXT, status={"enum": ["True", "False", "Unknown"]}))
POD_FAILURE_RULE = {
    "oneOf": [
        fields("action onExitCodes", action={"enum": ["FailJob", "Ignore", "Count"]}, onExitCodes=ON_EXIT_CODES),
        fields(
            "action onPodConditions", action={"enum": ["FailJob", "Ignore", "Count"]}, onPodConditions=ON_CONDITIONS
        ),
    ]
}
JOB_FAILURE_RULE = fields(
    "name action",
    name=TEXT,
    action={"enum": ["FailJobSet", "RestartJobSet", "RestartJobSetAndIgnoreMaxRestarts"]},
    onJobFailureReasons=each({"enum": ["BackoffLimitExceeded", "PodFailurePolicy", "DeadlineExceeded"]}),
)
RUNTIME = fields(
    "apiVersion kind metadata spec",
    apiVersion={"const": "trainer.kubeflow.org/v1alpha1"},
    kind={"const": "TrainingRuntime"},
    metadata=METADATA,
    spec=fields(
        "mlPolicy template",
        mlPolicy=fields("numNodes torch", numNodes=COUNT, torch=fields()),
        template=fields(
            "spec",
            spec=fields(
                "replicatedJobs",
                failurePolicy=fields(maxRestarts=SECONDS, rules=each(JOB_FAILURE_RULE)),
                replicatedJobs=each(
                    fields(
                        "name template",
                        name={"const": "node"},
                        template=fields(
                            "metadata spec",
                            metadata=fields(
                                "labels",
                                labels=fields(
                                    "trainer.kubeflow.org/trainjob-ancestor-step",
                                    **{"trainer.kubeflow.org/trainjob-ancestor-step": {"const": "trainer"}},
                                ),
                            ),
                            spec=fields(
                                "template",
                                backoffLimit=SECONDS,
                                podFailurePolicy=fields("rules", rules=each(POD_FAILURE_RULE)),
                                template=pod("node", restart_policy=True),
                            ),
                        ),
                    )
                ),
            ),
        ),
    ),
)
TRAINJOB = fields(
    "apiVersion kind metadata spec",
    apiVersion={"const": "trainer.kubeflow.org/v1alpha1"},
    kind={"const": "TrainJob"},
    metadata=METADATA,
    spec=fields(
        "runtimeRef trainer",
        runtimeRef=fields("name", name=NAME, kind={"enum": ["TrainingRuntime", "ClusterTrainingRuntime"]}),
        trainer=fields(numNodes=COUNT, resourcesPerNode=POD_RESOURCES, env=ENV, args=each(TEXT)),
    ),
)
CLAIM = fields(
    "apiVersion kind metadata spec",
    apiVersion={"const": "v1"},
    kind={"const": "PersistentVolumeClaim"},
    metadata=METADATA,
    spec=fields(
        "accessModes resources",
        accessModes=each({"enum": ["ReadWriteOnce", "ReadOnlyMany", "ReadWriteMany"]}),
        storageClassName=TEXT,
        resources=fields("requests", requests=RESOURCES),
    ),
)
KUBERNETES = {
    "PyTorchJob": PYTORCHJOB, "TrainingRuntime": RUNTIME, "TrainJob": TRAINJOB, "PersistentVolumeClaim": CLAIM,
}  # fmt: skip

SKYPILOT_TASK = fields(
    "name resources run",
    name=TEXT,
    workdir=TEXT,
    num_nodes=COUNT,
    resources=fields(
        "accelerators",
        infra=TEXT,
        accelerators={"type": "string", "pattern": r"^[\w-]+:\d+$"},
        use_spot={"type": "boolean"},
        disk_size=COUNT,
        job_recovery=fields(
            max_restarts_on_errors=SECONDS,
            recover_on_exit_codes=each({"type": "integer", "minimum": 1, "maximum": 255}),
        ),
    ),
    file_mounts={
        "type": "object",
        "additionalProperties": fields("name mode", name=TEXT, mode={"enum": ["MOUNT", "COPY", "MOUNT_CACHED"]}),
    },
    volumes={"type": "object", "additionalProperties": TEXT},
    envs={"type": "object", "additionalProperties": {"type": ["string", "null"]}},
    setup=TEXT,
    run=TEXT,
)
SKYPILOT_VOLUME = fields(
    "name type",
    name=NAME,
    type={"enum": ["k8s-pvc", "runpod-network-volume"]},
    infra=TEXT,
    size=QUANTITY,
    config=fields(access_mode={"enum": ["ReadWriteOnce", "ReadWriteMany"]}, storage_class_name=TEXT),
)
