package checkpoint

import (
	"archive/zip"
	"os/exec"
	"path/filepath"
	"strings"
	"testing"

	"plimsoll/optim/kernel"
	"plimsoll/optim/optimtest"
)

// python runs a program that must end well, and gives what it prints.
func python(t *testing.T, program string, arguments ...string) string {
	t.Helper()
	command := exec.Command(optimtest.Python(t, "torch", "safetensors", "numpy"), append([]string{"-c", program}, arguments...)...)
	out, err := command.CombinedOutput()
	if err != nil {
		t.Fatalf("%v\n%s", err, out)
	}
	return string(out)
}

// continueInTorch loads the file as a user would, and goes on training.
const continueInTorch = `
import sys, torch
saved = torch.load(sys.argv[1], weights_only=True)
mapped = torch.load(sys.argv[1], weights_only=True, mmap=True)
assert all(torch.equal(saved["master"][n], mapped["master"][n]) for n in saved["names"])
for i, n in enumerate(saved["names"]):
    for tensor in (saved["master"][n], saved["state"][i]["exp_avg"], saved["state"][i]["exp_avg_sq"]):
        print(n, list(tensor.shape), tensor.numpy().tobytes().hex())
parameters = [torch.nn.Parameter(saved["master"][n].clone()) for n in saved["names"]]
groups = [{"params": [parameters[i] for i in g["params"]]} for g in saved["param_groups"]]
optimizer = torch.optim.AdamW(groups, lr=1e-3)
own = optimizer.state_dict()["param_groups"]
optimizer.load_state_dict({"state": saved["state"], "param_groups": [{**a, "params": b["params"]} for a, b in zip(own, saved["param_groups"])]})
for p in parameters:
    p.grad = torch.ones_like(p)
optimizer.step()
for p in parameters:
    assert optimizer.state[p]["step"] == float(sys.argv[2]) + 1, optimizer.state[p]
`

func TestTorchGoesOnFromAnExport(t *testing.T) {
	f := format(kernel.Adam, kernel.Split, kernel.MomentsFP32, splitFormat.Parameter)
	job := newJob(t, f, 700, cutModel(smallModel, alike(f.Moments), 9000, 11700))
	train(t, job, 5, 3)
	path := save(t, t.TempDir(), job, "")
	c, err := Open(path)
	if err != nil {
		t.Fatal(err)
	}
	exported := filepath.Join(t.TempDir(), "optimizer.pt")
	var told int64
	if err := c.WriteTorch(t.Context(), exported, func(bytes int64) { told += bytes }); err != nil {
		t.Fatal(err)
	}
	if told != c.ExportBytes() {
		t.Errorf("progress was told of %d bytes, expected %d", told, c.ExportBytes())
	}
	checkAlignment(t, exported)
	got := strings.Split(strings.TrimSpace(python(t, continueInTorch, exported, "3")), "\n")
	want := linesOf(job)
	if len(got) != len(want) {
		t.Fatalf("%d tensors, want %d", len(got), len(want))
	}
	for _, line := range got {
		if !want[line] {
			t.Errorf("%.60s... is not what was saved", line)
		}
	}
}

// checkAlignment holds the storages against what torch's own writer does.
func checkAlignment(t *testing.T, path string) {
	archive, err := zip.OpenReader(path)
	if err != nil {
		t.Fatal(err)
	}
	defer archive.Close()
	for _, entry := range archive.File {
		if at, err := entry.DataOffset(); err != nil || at%alignment != 0 || entry.Method != zip.Store {
			t.Errorf("%s begins at %d with method %d: %v", entry.Name, at, entry.Method, err)
		}
	}
}
