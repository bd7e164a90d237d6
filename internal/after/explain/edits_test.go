package explain

import (
	"slices"
	"strings"
	"testing"

	"plimsoll/internal/after/evidence"
)

const alreadyOn = "export PYTORCH_CUDA_ALLOC_CONF=expandable_segments:True\n"

const inPieces = "torch.OutOfMemoryError: CUDA out of memory. Tried to allocate 1.00 GiB. GPU 0 has a total " +
	"capacity of 23.55 GiB of which 0.10 GiB is free. Including non-PyTorch memory, this process has " +
	"23.44 GiB memory in use. Of the allocated memory 17.90 GiB is allocated by PyTorch, and " +
	"5.00 GiB is reserved by PyTorch but unallocated. If " +
	"reserved but unallocated memory is large try setting PYTORCH_ALLOC_CONF=expandable_segments:True to avoid " +
	"fragmentation.\n"

func trace(call string) string {
	return "Traceback (most recent call last):\n  File \"t.py\", line 9, in main\n    " + call + "\n"
}

// TestAdvice: changes suit what the program did, and what the log shows as on is not proposed.
func TestAdvice(t *testing.T) {
	killed := "[7.1] oom-kill:constraint=CONSTRAINT_NONE,nodemask=(null),task=python,pid=8,uid=0\n" +
		"[7.2] Out of memory: Killed process 8 (python) total-vm:93451234kB, anon-rss:61234567kB, file-rss:0kB\n"
	for name, c := range map[string]struct {
		text         string
		proposes     []string
		doesNotOffer []string
	}{
		"training": {trace("loss.backward()") + full, []string{"micro batch", "gradient_checkpointing"}, nil},
		"saving": {trace("model.save_pretrained(path)") + full,
			[]string{"the state that is saved"}, []string{"micro batch"}},
		"step": {trace("optimizer.step()") + full, []string{"optimizer", "foreach"},
			[]string{"micro batch", "gradient_checkpointing"}},
		"evaluation": {
			trace("trainer.evaluate()") + full, []string{"per_device_eval_batch_size"}, []string{"micro batch"}},
		"generation": {
			trace("model.generate(**x)") + full, []string{"sequences generated"}, []string{"micro batch"}},
		"checkpointing is on": {"gradient_checkpointing=True,\n" + trace("loss.backward()") + full,
			[]string{"micro batch"}, []string{"gradient_checkpointing"}},
		"pieces":        {inPieces, []string{"PYTORCH_CUDA_ALLOC_CONF"}, nil},
		"pieces, as on": {alreadyOn + inPieces, []string{"empty_cache"}, []string{"PYTORCH_CUDA_ALLOC_CONF"}},
		"pieces beside an engine": {"INFO [gpu_worker.py:144] Sleep mode freed 35.43 GiB memory\n" + inPieces,
			[]string{"gpu_memory_utilization"}, []string{"PYTORCH_CUDA_ALLOC_CONF"}},
		"host without loaders": {killed, []string{"ranks on a node"}, []string{"num_workers", "low_cpu_mem_usage"}},
		"host with loaders":    {"dataloader_num_workers=4,\n" + killed, []string{"num_workers"}, nil},
		"host, as it loads":    {"Loading model from /models/x\n" + killed, []string{"low_cpu_mem_usage"}, nil},
		"host, as transformers 5 loads": {"Transformers version 5.2.0\nLoading model from /models/x\n" + killed, nil,
			[]string{"low_cpu_mem_usage"}},
	} {
		var keys []string
		for _, edit := range explainText(t, c.text).Edits {
			keys = append(keys, edit.Key)
		}
		all := strings.Join(keys, ", ")
		for _, key := range c.proposes {
			if !strings.Contains(all, key) {
				t.Errorf("%s: %s is not proposed, but %s", name, key, all)
			}
		}
		for _, key := range c.doesNotOffer {
			if strings.Contains(all, key) {
				t.Errorf("%s: %s is proposed: %s", name, key, all)
			}
		}
	}
}

// TestRemedyOfTheMessage: what the message itself proposes is said, except for fragmentation that is none.
func TestRemedyOfTheMessage(t *testing.T) {
	for text, want := range map[string]string{
		"RuntimeError: MPS backend out of memory (MPS allocated: 8.89 GB, other allocations: 172.98 MB, max " +
			"allowed: 9.07 GB). Tried to allocate 6.25 MB on private pool. Use " +
			"PYTORCH_MPS_HIGH_WATERMARK_RATIO=0.0 to disable upper limit for memory allocations " +
			"(may cause system failure).\n": "Use PYTORCH_MPS_HIGH_WATERMARK_RATIO",
		"RuntimeError: Not enough memory. Please try to increase --mem-fraction-static.\n": "--mem-fraction-static",
		inPieces: "expandable_segments:True",
		full:     "",
	} {
		notes := strings.Join(explainText(t, text).Notes, " ")
		if want == "" && strings.Contains(notes, "remedy") || !strings.Contains(notes, want) {
			t.Errorf("%q, expected %q", notes, want)
		}
	}
}

// TestWorkersOfOthers: fewer workers of data loaders are no advice where the worker is of Ray or of a pool.
func TestWorkersOfOthers(t *testing.T) {
	for of, want := range map[string]bool{"": true, "Ray": false, "a pool of processes": false} {
		e := Explain(Inputs{Sources: []*evidence.Source{from("log", evidence.TrainerLog,
			evidence.WorkerEnded{PIDs: []int{77}, Signal: "killed", Of: of},
			evidence.KernelKill{PID: 77, Constraint: "CONSTRAINT_MEMCG", Name: "python"})}})
		if got := slices.ContainsFunc(e.Edits, func(e Edit) bool { return e.Key == "num_workers" }); got != want ||
			e.Cause.Resource != CGroup {
			t.Errorf("%q: %v of %q, expected %v", of, e.Edits, e.Cause.Resource, want)
		}
	}
}
