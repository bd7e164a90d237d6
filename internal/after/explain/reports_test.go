package explain

import (
	"fmt"
	"slices"
	"strings"
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

const ranWell = "{'train_runtime': 612.11, 'train_samples_per_second': 4.1, 'train_steps_per_second': 0.51, " +
	"'train_loss': 1.31, 'epoch': 1.0}\n"

const rayReport = "(raylet) A worker died. Worker PID: 7 Worker exit type: SYSTEM_ERROR Worker exit detail: End of " +
	"file.\n"

// TestLabelledProcesses: processes that the lines of a file tell apart are nodes of their own, and a report is about
// the process that it names.
func TestLabelledProcesses(t *testing.T) {
	gone := "[rank1]: ncclRemoteError: A call failed possibly due to a network error or a remote process exiting.\n"
	steps := func(label string, from, to int) (text string) {
		for step := from; step <= to; step++ {
			text += fmt.Sprintf("%sstep:%d - loss:%d.5\n", label, step, step)
		}
		return text
	}
	for name, c := range map[string]struct {
		text    string
		want    Resource
		process string
	}{
		"an earlier error of another container": {"worker-3  | RuntimeError: CUDA error: an illegal memory access " +
			"was encountered\nworker-1  | " + gone + "worker-2  | Killed\n", NotMemory, "worker-3"},
		"an error of the container itself": {"worker-2  | RuntimeError: CUDA error: an illegal memory access " +
			"was encountered\nworker-2  | Killed\n", Undetermined, "worker-2"},
		"a peer goes on for a step": {steps("worker-1  | ", 1, 3) + "worker-2  | " + full +
			steps("worker-1  | ", 4, 4), GPU, "worker-2"},
		"the job goes on": {steps("(TaskRunner pid=9) ", 1, 3) + "(Worker pid=7) " + full +
			steps("(TaskRunner pid=9) ", 4, 8), None, ""},
		"another process ends it":           {"(Worker pid=7) " + full + "(TaskRunner pid=9) " + ranWell, None, ""},
		"the job ends without a label":      {"(Worker pid=7) " + full + ranWell, None, ""},
		"a job that is done is interrupted": {ranWell + "^C\n", None, ""},
		"somebody interrupts a job":         {"step:1 - loss:1.5\n^C\n", NotMemory, ""},
		"a process that waited": {"(Worker pid=7) ValueError: no labels\n" +
			"(Worker pid=8) [rank5]:[E1 x.cpp:1] [Rank 5] Watchdog caught collective operation timeout: " +
			"WorkNCCL(SeqNum=1) ran for 600001 milliseconds\n" +
			"(Worker pid=7) Traceback (most recent call last):\n(Worker pid=7)   File \"t.py\", line 1, in f\n" +
			"(Worker pid=7) ValueError: no labels\n", NotMemory, "Worker pid=7"},
		"a report on a process": {"(Worker pid=7) MemoryError\n" + rayReport, Host, "Worker pid=7"},
		"a host":                {"node12: Killed\n", Undetermined, ""},
		"a report on a rank":    {"(Worker pid=7) [rank5]: MemoryError\n" + rayReport, Host, ""},
	} {
		if e := explainText(t, c.text); e.Cause.Resource != c.want || e.Cause.Process != c.process {
			t.Errorf("%s: %q of %q, expected %q of %q: %s", name, e.Cause.Resource, e.Cause.Process, c.want, c.process,
				e.Cause.Text)
		}
	}
}

// TestWhoOfAHost: a label of a host tells no process, as a host has several.
func TestWhoOfAHost(t *testing.T) {
	if e := explainText(t, "node12: Killed\n"); !strings.HasPrefix(e.Cause.Text, "A process on node12") {
		t.Error(e.Cause.Text)
	}
}

// TestReportOnAVictim: what Ray says of a process that waited for another one names no cause.
func TestReportOnAVictim(t *testing.T) {
	for _, label := range []string{"(Worker pid=7) ", "(Worker pid=7) [rank5]: "} {
		e := explainText(t, label+"ncclRemoteError: A call failed possibly due to a remote process exiting\n"+rayReport)
		if !strings.Contains(e.Cause.Text, "the first to end is missing") {
			t.Errorf("%s: %s", label, e.Cause.Text)
		}
	}
	if e := explainText(t, rayReport); !strings.Contains(e.Cause.Text, "lost a worker of Ray") {
		t.Errorf("a report alone: %s", e.Cause.Text)
	}
}

// TestTasksOfSlurm: a task that starts ranks is no rank, and one of a job without a launcher is.
func TestTasksOfSlurm(t *testing.T) {
	tasks := "srun: error: n1: task 0: Exited with exit code 1\nsrun: error: n2: task 1: Killed\n"
	launched := "[rank3]: " + full +
		"E0601 10:00:41.100 12 torch/distributed/elastic/multiprocessing/api.py:869] failed (exitcode: 1) " +
		"local_rank: 3 (pid: 104) of binary: /usr/bin/python3\n"
	if e := explainText(t, launched+tasks); e.Cause.Rank == nil || *e.Cause.Rank != 3 || len(e.Victims) > 0 {
		t.Errorf("rank %v and victims %v, expected rank 3 and none", e.Cause.Rank, e.Victims)
	}
	if e := explainText(t, "[rank3]: "+full+tasks); len(e.Victims) != 2 {
		t.Errorf("victims %v, expected two", e.Victims)
	}
}

// TestLocalRank: where a launcher names only the rank's number on its node, that is said.
func TestLocalRank(t *testing.T) {
	e := explainText(t, "torch/distributed/elastic/multiprocessing/api.py:869] failed (exitcode: -9) local_rank: 3 "+
		"(pid: 104) of binary: python3\n")
	if e.Cause.Rank != nil || e.Cause.LocalRank == nil || *e.Cause.LocalRank != 3 {
		t.Errorf("%+v, expected local rank 3", e.Cause)
	}
}

// TestRankOfOneNode: on the only node of a job the number of a rank there is its rank.
func TestRankOfOneNode(t *testing.T) {
	failed := "torch/distributed/elastic/multiprocessing/api.py:869] failed (exitcode: -9) local_rank: 3 " +
		"(pid: 104) of binary: python3\n"
	for said, one := range map[string]bool{
		"[INFO] [launch.py:138:main] nnodes=1, num_local_procs=8, node_rank=0\n": true,
		"+ torchrun --standalone --nproc-per-node 8 train.py\n":                  true,
		"num_machines: 1\n": true,
		"llamafactory.cli:143 >> Initializing 8 distributed tasks at: 127.0.0.1:41285\n": true,
		"llamafactory.cli:143 >> Initializing 8 distributed tasks at: 10.0.0.7:41285\n":  false,
		"+ torchrun --nnodes=1:4 train.py\n":                                             false,
		"num_machines: 1\n+ torchrun --nnodes=2 train.py\n":                              false,
		"for one node set --nnodes=1\n":                                                  false,
	} {
		e := explainText(t, said+failed)
		if (e.Cause.Rank != nil && *e.Cause.Rank == 3) != one || (e.Cause.LocalRank != nil) == one {
			t.Errorf("%s: rank %v, local rank %v", said, e.Cause.Rank, e.Cause.LocalRank)
		}
	}
}

// TestOtherDaemonsKilled: the kernel's kill of a daemon does not explain an error of the program.
func TestOtherDaemonsKilled(t *testing.T) {
	kill := kill("CONSTRAINT_MEMCG")
	for name, want := range map[string]Resource{"mongod": NotMemory, "python3": CGroup} {
		kill.PID, kill.Name = 1412, name
		e := Explain(Inputs{Sources: []*evidence.Source{from("dmesg", evidence.KernelLog, kill),
			from("log", evidence.TrainerLog, evidence.Exception{Type: "RuntimeError", Message: "shape is invalid"})}})
		if e.Cause.Resource != want {
			t.Errorf("%s: %q, expected %q: %s", name, e.Cause.Resource, want, e.Cause.Text)
		}
	}
}

// TestOwnCall: a rank whose call to its own system failed is the one that lacked something, and one that misses a peer
// is not.
func TestOwnCall(t *testing.T) {
	full := "n1:168:168 [2] shmutils.cc:113 NCCL WARN Error while creating shared memory segment /dev/shm/nccl-Ubz " +
		"(size 9637888)\n"
	for error, named := range map[string]bool{
		"torch.distributed.DistBackendError: NCCL error in: NCCLUtils.hpp:268, unhandled system error": true,
		"ncclSystemError: System call (e.g. socket, malloc) failed":                                    true,
		"ncclRemoteError: A call failed possibly due to a remote process exiting":                      false,
	} {
		e := explainText(t, full+"[rank2]: "+error+"\n")
		if e.Cause.Resource != SharedMemory || (e.Cause.Rank != nil) != named {
			t.Errorf("%s: %q of rank %v, expected shared memory, and that the rank is named: %v", error,
				e.Cause.Resource, e.Cause.Rank, named)
		}
	}
}

// TestLocalRankBesideAKill: the rank whose exception a launcher reports is not the process that the kernel killed.
func TestLocalRankBesideAKill(t *testing.T) {
	raised := "Traceback (most recent call last):\n  File \"t.py\", line 1, in f\nValueError: no batch\n" +
		"torch/distributed/elastic/multiprocessing/api.py:869] failed (exitcode: 1) local_rank: 3 (pid: 104) of " +
		"binary: python3\n"
	killed := kill("CONSTRAINT_MEMCG")
	killed.PID, killed.Name = 1412, "python3"
	for name, c := range map[string]struct {
		kernel []*evidence.Source
		local  bool
	}{
		"alone":       {nil, true},
		"with a kill": {[]*evidence.Source{from("dmesg", evidence.KernelLog, killed)}, false},
		"with a kill that is counted": {[]*evidence.Source{from("memory.events", evidence.CgroupCounter,
			events("/job", 1, 1))}, false},
	} {
		e := Explain(Inputs{Sources: append(c.kernel, readSource(t, "train.log", []byte(raised)))})
		said := strings.HasPrefix(e.Cause.Text, "Local rank 3")
		if (e.Cause.LocalRank != nil) != c.local || said != c.local {
			t.Errorf("%s: local rank %v: %s", name, e.Cause.LocalRank, e.Cause.Text)
		}
	}
}

// TestLimitOfMacOS: macOS kills for the limit of a process, or as the host is full.
func TestLimitOfMacOS(t *testing.T) {
	for reason, want := range map[string]Resource{"per-process-limit": CGroup, "vm-pageshortage": Host} {
		e := explainText(t, "kernel: memorystatus: killing_specific_process pid 4242 [python3.11] ("+reason+
			" 100) 30212345KB\n")
		if e.Cause.Resource != want {
			t.Errorf("%s: %q, expected %q: %s", reason, e.Cause.Resource, want, e.Cause.Text)
		}
	}
}

// TestBusErrorOfAFile: what the process was doing tells a mapped file from shared memory. Without that a SIGBUS is most
// likely of /dev/shm.
func TestBusErrorOfAFile(t *testing.T) {
	const fatal = "Fatal Python error: Bus error\n\n"
	other := "Thread 0x00007a11 (most recent call first):\n  File \"/v/safetensors/torch.py\", line 9 in load_file\n\n"
	current := func(call string) string {
		return "Current thread 0x00007a12 (most recent call first):\n  File \"/v/x.py\", line 1250 in " + call + "\n"
	}
	deep := strings.Replace(current("f"), "in f\n", "in f\n"+strings.Repeat("  File \"/v/x.py\", line 1 in g\n", 6)+
		"  File \"/v/x.py\", line 2 in load_weights\n", 1)
	for name, c := range map[string]struct {
		text string
		want Resource
	}{
		"a loader of weights":  {fatal + other + current("weight_loader"), NotMemory},
		"another thread loads": {fatal + other + current("_feed"), SharedMemory},
		"a call far outside":   {fatal + deep, SharedMemory},
		"no stack":             {"Bus error (core dumped)\n", SharedMemory},
		"weights are loaded":   {"Loading weights from /lustre/m\nBus error (core dumped)\n", Undetermined},
		"a task loads weights": {"Loading weights from /m\nsrun: error: n3: task 13: Bus error\n", Undetermined},
		"weights are being loaded": {"Loading checkpoint shards:  41%|# | 7/17 [00:03<00:05]\nBus error\n",
			Undetermined},
		"weights were loaded": {"Loading checkpoint shards: 100%|##| 7/7 [00:03<00:00]\nBus error\n",
			SharedMemory},
		"training has gone on": {"Loading weights from /m\nstep 1 loss 2.5\nBus error\n", SharedMemory},
		"long after the load": {"Loading weights from /m\n" + strings.Repeat("ready\n", 9) + "Bus error\n",
			SharedMemory},
	} {
		e := explainText(t, c.text)
		if e.Cause.Resource != c.want {
			t.Errorf("%s: %q, expected %q: %s", name, e.Cause.Resource, c.want, e.Cause.Text)
		}
		if slices.Contains(e.Collect, collectFiles) != (c.want != SharedMemory) {
			t.Errorf("%s: to be collected are %+v", name, e.Collect)
		}
	}
}

// TestTaskOfRay: a task whose error is only named ran out of a GPU's memory, unless Ray has killed a worker, or the
// error itself is there.
func TestTaskOfRay(t *testing.T) {
	task := "ray.exceptions.RayTaskError(OutOfMemoryError): ray::Worker.update_actor() (pid=118, ip=10.130.71.7)\n"
	for name, c := range map[string]struct {
		text   string
		want   Resource
		detail string
	}{
		"named only":          {task, GPU, ""},
		"with PyTorch's line": {task + full, GPU, "capacity"},
		"beside a kill": {"(raylet) 2 Workers (tasks / actors) killed due to memory pressure (OOM), 0 crashed\n" +
			task, Host, ""},
	} {
		e := explainText(t, c.text)
		if e.Cause.Resource != c.want || e.Cause.Detail != c.detail {
			t.Errorf("%s: %q (%s), expected %q (%s)", name, e.Cause.Resource, e.Cause.Detail, c.want, c.detail)
		}
	}
}
