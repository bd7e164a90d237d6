package explain

import (
	"testing"
	"time"

	"plimsoll/internal/after/evidence"
)

const full = "torch.OutOfMemoryError: CUDA out of memory. Tried to allocate 2.50 GiB. GPU 0 has a total capacity of " +
	"23.55 GiB of which 1.10 GiB is free. Including non-PyTorch memory, this process has 22.44 GiB memory in use. Of " +
	"the allocated memory 21.90 GiB is allocated by PyTorch, and 40.00 MiB is reserved by PyTorch but unallocated.\n"

const noSpace = "Traceback (most recent call last):\n  File \"t.py\", line 9, in <module>\n    torch.save(s, p)\n" +
	"OSError: [Errno 28] No space left on device: '/ckpt/model.pt'\n"

// TestReportsOnProcesses: the word of a parent, of an agent or of a tuner on a process is no failure of its own.
func TestReportsOnProcesses(t *testing.T) {
	for name, c := range map[string]struct {
		text string
		want Resource
	}{
		"a parent names the signal": {"(APIServer pid=4) Traceback (most recent call last):\n" +
			"(APIServer pid=4)   File \"vllm\", line 8, in <module>\n(APIServer pid=4) RuntimeError: Engine core " +
			"initialization failed. See root cause above. Failed core proc(s): {'EngineCore_0': -9}\n", Undetermined},
		"Ray counts no kill": {"Traceback (most recent call last):\n  File \"t.py\", line 1, in f\n" +
			"KeyError: 'labels'\n(raylet) node_manager.cc:3069: 0 Workers (tasks / actors) killed due to memory " +
			"pressure (OOM), 1 Workers crashed due to other reasons at node (ID: 3, IP: 10.0.0.17)\n", NotMemory},
		"a tuner goes on": {full + "[ERROR] [launch.py:325:sigkill_handler] ['python', 't.py', '--local_rank=0'] " +
			"exits with return code = 1\n[INFO] [autotuner.py:700:tune] Done tuning: best is z2_mbs4\n", None},
		"of two runs the last": {
			"$ python train.py --batch 8\n" + full + "$ python train.py --batch 1\n" + noSpace, Disk},
		"of two trainings the last": {
			"***** Running training *****\n" + full + "***** Running training *****\n" + noSpace,
			Disk},
		"one run":                         {"$ python train.py --batch 8\n" + full, GPU},
		"a run of which nothing is shown": {full + "$ python train.py --batch 1\n", GPU},
	} {
		if e := explainText(t, c.text); e.Cause.Resource != c.want {
			t.Errorf("%s: %q, expected %q: %s", name, e.Cause.Resource, c.want, e.Cause.Text)
		}
	}
}

// TestKernelBeforePolling: the kernel's time of a kill goes before the order in which a launcher saw ranks end.
func TestKernelBeforePolling(t *testing.T) {
	at := func(seconds int64, fact evidence.Fact) evidence.Finding {
		return evidence.Finding{Line: evidence.Line{File: "log", Number: int(seconds)}, Rank: evidence.NoRank,
			Time: time.Unix(seconds, 0), Fact: fact}
	}
	first := ended(0, 70, 0, 9)
	first.First = true
	killed := kill("CONSTRAINT_MEMCG")
	late := killed
	late.PID = 70
	e := Explain(Inputs{Sources: []*evidence.Source{
		{Name: "log", Kind: evidence.TrainerLog, Findings: []evidence.Finding{
			at(105, first), at(107, ended(1, 77, 0, 9))}},
		{Name: "dmesg", Kind: evidence.KernelLog, Findings: []evidence.Finding{at(103, killed), at(104, late)}},
	}})
	if e.Cause.Rank == nil || *e.Cause.Rank != 1 {
		t.Errorf("%+v, expected rank 1", e.Cause)
	}
}
