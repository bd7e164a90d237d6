package evidence

import (
	"bytes"
	"strings"
	"testing"
)

// documents are files that are read as a whole, or only recognized.
var documents = []struct {
	name, text string
	kind       Kind
	flag       string
	facts      string // with their lines
}{
	{name: "kubectl get pod -o json", kind: Kubernetes, text: `{
  "apiVersion": "v1",
  "kind": "Pod",
  "spec": {
    "containers": [{"name": "trainer", "resources": {"limits": {"memory": "64Gi"}}}],
    "volumes": [{"name": "shm", "emptyDir": {"medium": "Memory", "sizeLimit": "8Gi"}}]
  },
  "status": {
    "containerStatuses": [
      {
        "name": "trainer",
        "lastState": {
          "terminated": {
            "exitCode": 137,
            "reason": "OOMKilled"
          }
        }
      }
    ]
  }
}
`, facts: `5 Limit{Name:memory.max Group:container trainer Bytes:64.0 GiB}
6 Limit{Name:/dev/shm Group: Bytes:8.00 GiB}
15 BatchKill{By:Kubernetes What:container trainer PID:0 Count:0 Limit:64.0 GiB Used:unknown}
15 ProcessEnded{By:Kubernetes Rank:-1 LocalRank:-1 PID:0 ExitCode:137 Signal:0 Victim:false First:false}
`},
	{name: "kubectl get pod -o yaml", kind: Kubernetes, text: `apiVersion: v1
kind: List
items:
- apiVersion: v1
  kind: Pod
  status:
    reason: Evicted
    message: 'The node was low on resource: memory. Threshold quantity: 100Mi'
- apiVersion: v1
  kind: Event
  reason: OOMKilling
  involvedObject: {name: trainer-0}
`, facts: `8 BatchEnd{By:Kubernetes Reason:evicted: the node was low on memory Orderly:false}
11 BatchKill{By:Kubernetes What:trainer-0 PID:0 Count:0 Limit:unknown Used:unknown}
`},
	{name: "docker inspect", kind: Docker, text: `[
  {
    "Id": "0123",
    "Name": "/trainer",
    "State": {
      "Status": "exited",
      "OOMKilled": true,
      "ExitCode": 137
    },
    "HostConfig": {
      "Memory": 68719476736,
      "ShmSize": 67108864,
      "Ulimits": [{"Name": "memlock", "Hard": 65536, "Soft": 65536}]
    }
  }
]
`, facts: `7 BatchKill{By:Docker What:container trainer PID:0 Count:0 Limit:64.0 GiB Used:unknown}
8 ProcessEnded{By:Docker Rank:-1 LocalRank:-1 PID:0 ExitCode:137 Signal:0 Victim:false First:false}
11 Limit{Name:memory.max Group:container trainer Bytes:64.0 GiB}
12 Limit{Name:/dev/shm Group:container trainer Bytes:64.0 MiB}
13 Limit{Name:RLIMIT_MEMLOCK Group:container trainer Bytes:64.0 KiB}
`},
	{name: "sacct --json", kind: Slurm, text: `{
  "meta": {},
  "jobs": [
    {
      "job_id": 41003,
      "state": {"current": ["OUT_OF_MEMORY"], "reason": "OutOfMemory"},
      "exit_code": {"return_code": {"number": 0}, "signal": {"id": {"number": 125}}},
      "tres": {"requested": [{"type": "mem", "count": 65536}]},
      "steps": [
        {
          "step": {"id": "41003.0"},
          "state": ["FAILED"],
          "exit_code": {"return_code": {"number": 1}, "signal": {"id": {"number": 0}}},
          "tres": {"requested": {"max": [{"type": "mem", "count": 68608000000, "task": 0}]}}
        }
      ]
    }
  ]
}
`, facts: `6 BatchKill{By:Slurm What:41003 PID:0 Count:0 Limit:64.0 GiB Used:unknown}
6 Counters{Group:41003 File:sacct Values:map[ReqMem:68719476736]}
12 ProcessEnded{By:Slurm Rank:-1 LocalRank:-1 PID:0 ExitCode:1 Signal:0 Victim:false First:false}
12 Counters{Group:41003.0 File:sacct Values:map[MaxRSS:68608000000]}
`},
	{name: "trainer_state.json", kind: TrainerLog, text: `{
  "epoch": 1.0,
  "global_step": 500,
  "log_history": [{"loss": 1.0, "step": 500}]
}
`, facts: `3 Progress{Phase: Step:500 Of:0 Begins:false Bar:false Epoch:false Metrics:false}
`},
	{name: "exit code", kind: ExitCode, text: "137\n",
		facts: "1 ProcessEnded{By:shell Rank:-1 LocalRank:-1 PID:0 ExitCode:137 Signal:0 Victim:false First:false}\n"},
	{name: "exit code of Python", kind: ExitCode, text: "rc = -9",
		facts: "1 ProcessEnded{By:shell Rank:-1 LocalRank:-1 PID:0 ExitCode:0 Signal:9 Victim:false First:false}\n"},
	{name: "DeepSpeed's configuration", kind: "DeepSpeed JSON configuration", flag: "--deepspeed",
		text: `{"zero_optimization": {"stage": 3}, "train_batch_size": "auto"}`},
	{name: "accelerate's configuration", kind: "accelerate configuration in YAML", flag: "--accelerate",
		text: "compute_environment: LOCAL_MACHINE\ndistributed_type: DEEPSPEED\nnum_machines: 1\n"},
	{name: "TrainingArguments", kind: "file of TrainingArguments", flag: "--training-args",
		text: `{"output_dir": "out", "per_device_train_batch_size": 4, "learning_rate": 1e-5}`},
	{name: "model", kind: "config.json of a model", flag: "--model",
		text: `{"architectures": ["LlamaForCausalLM"], "hidden_size": 4096}`},
	{name: "recording", kind: Recording,
		text: `{"time_ns":0,"start":{"schema":"plimsoll.samples/1","version":"1"}}` + "\n" + `{"time_ns":1,"end":{}}` + "\n"},
	{name: "plan", kind: Plan, text: "{\n  \"schema\": \"plimsoll.plan/2\",\n  \"devices\": []\n}\n"},
	{name: "explanation", kind: Explanation, text: `{"schema":"plimsoll.explanation/1"}`},
	{name: "Chrome trace", kind: Trace, text: `{"schemaVersion": 1, "traceEvents": [{"ph": "X", "ts": 1}]}`},
	{name: "Chrome trace as an array", kind: Trace, text: `[{"ph": "X", "ts": 1, "name": "a"}]`},
	{name: "memory timeline", kind: Timeline, text: `[[1, 2], [[0, 1], [0, 2]]]`},
	{name: "snapshot", kind: Snapshot,
		text: "\x80\x04\x95\x10\x00\x00\x00\x00\x00\x00\x00}\x94(\x8c\x08segments\x94]\x94u."},
	{name: "another pickle", kind: Binary,
		text: "\x80\x04\x95\x10\x00\x00\x00\x00\x00\x00\x00}\x94(\x8c\x05model\x94]\x94u."},
	{name: "a pod that its node rejected", kind: Kubernetes,
		text: "apiVersion: v1\nkind: Pod\nstatus:\n  reason: Evicted\n" +
			"  message: 'Pod was rejected: The node had condition: [MemoryPressure]. '\n",
		facts: "5 BatchEnd{By:Kubernetes Reason:evicted: the node was low on memory Orderly:false}\n"},
	{name: "a status of another system", text: "status:\n  Statuses: fine\n  reason: Evicted\n"},
	{name: "a poem", text: "Roses are red,\nviolets are blue.\n"},
	{name: "a document of JSON", text: `{"roses": "red"}`},
	{name: "an archive", kind: Binary, text: "PK\x03\x04CUDA error: out of memory\n"},
	{name: "bytes", kind: Binary, text: "\x01\x02\x00\x9c\x00\x03\xff"},
}

func TestDocuments(t *testing.T) {
	for _, d := range documents {
		s := readText(t, d.name, []byte(d.text))
		if got := factsOf(s, true); s.Kind != d.kind || s.Flag != d.flag || got != d.facts {
			t.Errorf("%s: kind %q, flag %q:\n%s", d.name, s.Kind, s.Flag, got)
		}
	}
}

// TestCutDocument: a document that is cut is read line by line.
func TestCutDocument(t *testing.T) {
	text := documents[0].text
	s := readText(t, "pod.json", []byte(text[:strings.Index(text, `"OOMKilled"`)+len(`"OOMKilled"`)]))
	if len(s.Findings) == 0 || s.Kind != Kubernetes {
		t.Errorf("kind %q, %+v", s.Kind, s.Findings)
	}
}

func TestEmptyFile(t *testing.T) {
	if _, err := Read("log", strings.NewReader("")); err == nil || !strings.Contains(err.Error(), "empty") {
		t.Error(err)
	}
}

func TestCutAtTheBeginning(t *testing.T) {
	_, err := Read("log", bytes.NewReader(wholes["gzip"]([]byte("CUDA error"))[:10]))
	if err == nil || !strings.Contains(err.Error(), "compressed") {
		t.Error(err)
	}
}

// TestCutCompression: of a compressed file that is cut, the beginning counts.
func TestCutCompression(t *testing.T) {
	text := []byte("CUDA error: out of memory\n" + strings.Repeat("all is well\n", 100_000))
	for _, name := range []string{"gzip", "xz", "zstd"} {
		whole := wholes[name](text)
		s := readText(t, name, whole[:len(whole)-8])
		if !s.Cut || len(s.Findings) != 1 {
			t.Errorf("%s: cut %v, %+v", name, s.Cut, s.Findings)
		}
		if s := readText(t, name, whole); s.Cut || len(s.Findings) != 1 || s.Lines != 100_001 {
			t.Errorf("%s: cut %v, %d lines", name, s.Cut, s.Lines)
		}
	}
}
