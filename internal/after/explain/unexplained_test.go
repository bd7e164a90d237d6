package explain

import (
	"fmt"
	"slices"
	"strings"
	"testing"
	"time"

	"plimsoll/internal/after/evidence"
	"plimsoll/internal/base/ledger"
	"plimsoll/internal/base/samples"
)

const twoSteps = "step 10 loss 1.91\nstep 20 loss 1.88\n"

// TestNoneNeedsEvidence: what speaks of a failure and is not understood is no success, except where the program went
// on, has dealt with it, or a launcher says that it ended well.
func TestNoneNeedsEvidence(t *testing.T) {
	for text, want := range map[string]Resource{
		"frobnicator.FrobError: the tape is torn\n":                                Undetermined,
		"FATAL: cannot go on\n":                                                    Undetermined,
		"distributed.scheduler.KilledWorker: Attempted to run task on 4 workers\n": Undetermined,
		"google.api_core.exceptions.ServiceUnavailable: 503 failed to connect\n":   Undetermined,
		"StopIteration\n": Undetermined,
		"[ONNXRuntimeError] : 1 : FAIL : Load model failed\n":                                            Undetermined,
		"onnx runtime error 2: not enough space: expected 3, got 2\n":                                    Undetermined,
		"loading my.errors.Table: done\n":                                                                None,
		"returned XYZ_STATUS_EXEC_FAILED\n":                                                              Undetermined,
		" 41%|####      | 41/100 [00:12<00:20,  3.10it/s]Killed\n":                                       Undetermined,
		"FATAL: cannot go on\nstep 30 loss 1.8\nstep 40 loss 1.7\n":                                      None,
		"XError: no kernel fits\nIgnoring this choice.\n":                                                None,
		"FATAL: cannot go on\n$ echo $?\n0\n":                                                            None,
		"If you see CUDA out of memory errors, reduce the batch size.\n":                                 None,
		"=========== 12 passed, 3 warnings in 4.20s ===========\n":                                       None,
		"RuntimeError: XPU: allocation of 512 bytes failed: insufficient memory\n":                       GPU,
		"engine: malloc of 512 MiB failed: not enough memory\n":                                          Host,
		"RuntimeError: cudaHostAlloc failed: not enough memory\n":                                        Host,
		"RuntimeError: received 0 items of ancdata\n":                                                    NotMemory,
		"libc++abi: terminating due to uncaught exception of type x::Y: bad tape\n":                      NotMemory,
		"RuntimeError: HIP error: misaligned address\n":                                                  NotMemory,
		"trainer-0   0/1   OOMKilled   0   2m29s\n":                                                      CGroup,
		"jobs   trainer-0   0/1   OOMKilled   1 (3s ago)   2m29s\n":                                      CGroup,
		"trainer-0   0/1   CrashLoopBackOff   3 (12s ago)   2m29s\n":                                     Undetermined,
		"trainer-0   1/1   Running   3 (12s ago)   2m29s\n":                                              None,
		"[INFO] [launch.py:319:sigkill_handler] Killing subprocess 410126\n":                             Undetermined,
		"RuntimeError: DataLoader worker (pid 25902) is killed by signal: Segmentation fault\n":          NotMemory,
		"RuntimeError: DataLoader worker (pid 25902) is killed by signal: Killed. \n":                    Undetermined,
		"Killed python3 ./finetune/lora/train.py\n":                                                      Undetermined,
		"('Connection aborted.', RemoteDisconnected('Remote end closed connection without response'))\n": Undetermined,
		"Runner terminated: container exceeded memory limit\n":                                           CGroup,
		"W1 agent/server/api.py:719] torch.SignalException: Process 3 got signal: 1\n":                   NotMemory,
	} {
		e := explainText(t, twoSteps+text)
		if e.Cause.Resource != want {
			t.Errorf("%q is %q (%s), want %q: %s", text, e.Cause.Resource, e.Confidence, want, e.Cause.Text)
		}
		if want == Undetermined && (len(e.Evidence) == 0 || len(e.Collect) == 0) {
			t.Errorf("%q: no line is quoted, or nothing is to be collected", text)
		}
	}
}

// TestStepsOfAnyTrainer: the steps that follow tell that an error was overcome, whichever trainer counts them. Those of
// before it tell nothing.
func TestStepsOfAnyTrainer(t *testing.T) {
	const failed = "torch.OutOfMemoryError: CUDA out of memory. Tried to allocate 2.00 GiB. " +
		"GPU 0 has a total capacity of 79.10 GiB of which 1.20 GiB is free. Including non-PyTorch memory, " +
		"this process has 77.80 GiB memory in use. Of the allocated memory 75.10 GiB is allocated by PyTorch, and " +
		"1.90 GiB is reserved by PyTorch but unallocated.\n"
	for name, step := range map[string]string{
		"Trainer":     "{'loss': 2.%[1]d, 'grad_norm': 1.2, 'learning_rate': 1e-05, 'epoch': 0.0%[1]d}\n",
		"verl":        "(TaskRunner pid=812) step:%d - actor/pg_loss:0.01 - actor/kl_loss:0.2\n",
		"MLX":         "Iter %d: Train loss 2.104, Learning Rate 1.000e-05, It/sec 0.5\n",
		"nanoGPT":     "iter %d: loss 3.2104, time 121.20ms, mfu 31.02%%\n",
		"epochs":      "Epoch %d/90, loss: 0.4120\n",
		"MMEngine":    "Epoch(train) [%d][50/90]  lr: 1.0e-04  loss: 0.4120\n",
		"Ultralytics": "      %d/90      7.31G      1.204     0.8120      1.102         41        640\n",
		"MLPerf": `:::MLLOG {"key": "train_loss", "value": 4.1, "metadata": {"samples_count": %d, "file": "t.py"}}` +
			"\n",
	} {
		var before, after string
		for i := range 4 {
			before += fmt.Sprintf(step, i+1)
			after += fmt.Sprintf(step, i+5)
		}
		if e := explainText(t, before+failed); e.Cause.Resource != GPU {
			t.Errorf("%s, at the end: %q", name, e.Cause.Resource)
		}
		if e := explainText(t, before+failed+after); e.Cause.Resource != None {
			t.Errorf("%s, overcome: %q: %s", name, e.Cause.Resource, e.Cause.Text)
		}
		if name == "Trainer" { // its lines have no number
			continue
		}
		if e := explainText(t, after+failed+before); e.Cause.Resource != GPU {
			t.Errorf("%s, steps of before: %q", name, e.Cause.Resource)
		}
	}
}

// TestEndsAsAsked: a server that ends as asked, ranks that leave a finished training one after the other, and what
// services of the host say are no failures. What else fails is one.
func TestEndsAsAsked(t *testing.T) {
	const asked = "(EngineCore pid=71) INFO core.py:1201] [shutdown] EngineCore: trigger received signal=SIGTERM\n"
	const trace = "Traceback (most recent call last):\n  File \"/srv/t.py\", line 3, in <module>\n    go()\n"
	const finished = twoSteps + "Training complete\n"
	const missed = "[rank1]:[W209 07:28:49.1 ProcessGroupNCCL.cpp:1771] [PG ID 0 Rank 1] Failed to check the " +
		"\"should dump\" flag on TCPStore, (maybe TCPStore server has shut down too early), with error: Broken pipe\n"
	const service = "[   12.101] systemd[1]: snapd.service: Main process exited, code=exited, status=1/FAILURE\n"
	for name, c := range map[string]struct {
		text string
		want Resource
	}{
		"a server": {asked, None},
		"a server, and a dead engine": {asked + trace +
			"EngineDeadError: EngineCore died\n", Undetermined},
		"a trainer": {twoSteps +
			"W1 agent/server/api.py:719] Received 15 death signal, shutting down workers\n", Undetermined},
		"the end of Python":     {trace + "SystemExit: 0\n", None},
		"another end of Python": {trace + "SystemExit: 3\n", Undetermined},
		"ranks part":            {finished + missed, None},
		"a service":             {finished + service, None},
		"a wrong argument": {"usage: t.py [-h]\n" +
			"t.py: error: argument --bs: invalid int value: 'x'\n", NotMemory},
		"git": {finished + "Cmd('git') failed due to: exit code(128)\n", None},
	} {
		if e := explainText(t, c.text); e.Cause.Resource != c.want {
			t.Errorf("%s: %q (%s), want %q: %s", name, e.Cause.Resource, e.Confidence, c.want, e.Cause.Text)
		}
	}
}

// TestErrorBehindExitCode: an error at the end of the output is one, whatever the exit code of the script around it.
// Where the output goes on, the program has dealt with it.
func TestErrorBehindExitCode(t *testing.T) {
	failed := []string{"Traceback (most recent call last):", `  File "t.py", line 3, in <module>`,
		"OSError: [Errno 24] Too many open files"}
	for name, c := range map[string]struct {
		lines []string
		want  Resource
	}{
		"at the end": {append(failed, "done"), NotMemory},
		"goes on":    {append(failed, "a", "b", "c", "d", "e"), None},
	} {
		e := Explain(Inputs{Recordings: []*Recording{recorded(samples.Sample{}, samples.RankEnd{}, c.lines...)}})
		if e.Cause.Resource != c.want {
			t.Errorf("%s: %q, want %q", name, e.Cause.Resource, c.want)
		}
	}
}

// TestPipeHidesEnds: the exit code 0 of a pipe is no proof of a good end. The trainer's own word is.
func TestPipeHidesEnds(t *testing.T) {
	for output, want := range map[string]Resource{"step 3 loss 1": Undetermined, "{'train_runtime': 9.1}": None} {
		for _, command := range [][]string{
			{"bash", "-c", "python t.py | tee log"},
			{"/bin/bash", "-lc", `"$@" 2>&1 | tee log`, "bash", "python", "t.py"},
			{"timeout", "600", "sh", "-e", "-c", "python t.py|tee log"},
		} {
			r := recorded(samples.Sample{}, samples.RankEnd{}, output)
			r.start.Start.Command = command
			e := Explain(Inputs{Recordings: []*Recording{r}})
			if e.Cause.Resource != want || !strings.Contains(strings.Join(e.Notes, " "), "pipefail") {
				t.Errorf("%q: %q: %q, %s, %q", command, output, e.Cause.Resource, e.Confidence, e.Notes)
			}
		}
	}
}

// TestShellMayHideFailure: the exit code 0 of a shell is that of its last command, so nothing is certain.
func TestShellMayHideFailure(t *testing.T) {
	for _, c := range []struct {
		want    Confidence
		command []string
	}{
		{Likely, []string{"sh", "-c", `"$@" || true`, "sh", "python", "t.py"}},
		{Likely, []string{"bash", "-c", "python t.py; echo done"}},
		{Likely, []string{"bash", "run.sh"}},
		{Likely, []string{"env", "A=1", "bash", "-x", "run.sh"}},
		{Certain, []string{"sh", "-c", "exec python t.py"}},
		{Certain, []string{"python", "t.py", "-c", "a;b"}},
		{Certain, []string{"python", "t.py", "--out", "a", "--shell", "sh", "-c", "a;b"}},
	} {
		r := recorded(samples.Sample{}, samples.RankEnd{}, "step 3 loss 1")
		r.start.Start.Command = c.command
		if e := Explain(Inputs{Recordings: []*Recording{r}}); e.Cause.Resource != None || e.Confidence != c.want {
			t.Errorf("%q: %q (%s), expected none (%s)", c.command, e.Cause.Resource, e.Confidence, c.want)
		}
	}
}

// TestLogThatStops: a log that ends between two steps is no proof of a good end.
func TestLogThatStops(t *testing.T) {
	bar := "\r 40%|####      | 40/100 [00:12<00:20,  3.10it/s]"
	for text, want := range map[string]Resource{
		bar + "\n": Undetermined,
		bar + "\n{'loss': 1.2}\n\r 41%|####      | 41/100 [00:13<00:20,  3.10it/s]":     Undetermined,
		bar + "\r100%|##########| 100/100 [00:30<00:00,  3.10it/s]\n":                   None,
		bar + "\n{'train_runtime': 9.1}\n":                                              None,
		bar + "\n" + strings.Repeat("saved\n", 9):                                       None,
		" iteration  5/ 10 | elapsed time per iteration (ms): 9.1 | lm loss: 2E+00 |\n": None,
	} {
		if e := explainText(t, text); e.Cause.Resource != want || want == Undetermined && len(e.Collect) == 0 ||
			strings.HasPrefix(text, " iteration") && e.Confidence != Unknown {
			t.Errorf("%q: %q (%s)", text, e.Cause.Resource, e.Cause.Text)
		}
	}
}

// TestGrowthOfUnended: a recording that stops tells how fast memory grew, and who had it.
func TestGrowthOfUnended(t *testing.T) {
	r := NewRecording("run.jsonl", samples.Record{Start: &samples.Start{Schema: samples.Schema}})
	for i := range 4 {
		r.Add(&samples.Record{Time: time.Duration(i) * time.Second, Sample: &samples.Sample{
			Node: samples.Node{Memory: 64 * gib, Available: 60*gib - ledger.Bytes(i)*gib},
			Processes: []samples.Process{{PID: 7, Name: "python", Role: samples.RankProcess,
				Proportional: samples.Kinds{Anonymous: ledger.Bytes(i) * gib}}}}})
	}
	e := Explain(Inputs{Recordings: []*Recording{r}})
	if len(e.Evidence) != 1 || !strings.Contains(e.Evidence[0].Says, "grew by 1.00 GiB a "+
		"second") || len(e.Holders) != 1 {
		t.Errorf("%+v, %+v", e.Evidence, e.Holders)
	}
}

// TestFreeGPU: "out of memory" of a library beside a GPU that is mostly free is no full GPU.
func TestFreeGPU(t *testing.T) {
	e := Explain(Inputs{Sources: []*evidence.Source{from("log", evidence.TrainerLog,
		evidence.GPUUsage{Total: known(80 * gib), Free: known(70 * gib)},
		evidence.LibraryFailed{Library: "NCCL", Memory: true})}})
	if e.Cause.Resource != Undetermined {
		t.Errorf("%q, %s", e.Cause.Resource, e.Cause.Text)
	}
}

// TestAccountedHolders: sacct tells what the largest task of a step held. Steps that ended well did not fill the
// cgroup.
func TestAccountedHolders(t *testing.T) {
	e := explainText(t, "JobID|State|ExitCode|MaxRSS|ReqMem\n"+
		"812|OUT_OF_MEMORY|0:125||4G\n812.extern|COMPLETED|0:0|912K|\n812.0|OUT_OF_MEMORY|0:125|3K|\n")
	want := []Holder{{"step 812.0", 3 << 10, "the largest task when Slurm last sampled it"}}
	if e.Cause.Resource != CGroup || !slices.Equal(e.Holders, want) {
		t.Errorf("%q, %v, want %v", e.Cause.Resource, e.Holders, want)
	}
}

// TestSupposesBySentence: words such as "may" take the weight from their own sentence, and not from an error beside it.
func TestSupposesBySentence(t *testing.T) {
	for line, want := range map[string]Resource{
		"Check failed: slots > 0. This may be a bug of the loader":              Undetermined,
		"Earlier steps may be slow. Check failed: slots > 0":                    Undetermined,
		"Check failed: slots > 0 may be printed by the loader":                  None,
		"RuntimeError: CUDA error: misaligned address. Kernels may run late":    NotMemory,
		"CUDA error: misaligned address may be reported by some other API call": None,
	} {
		if e := explainText(t, twoSteps+line+"\n"); e.Cause.Resource != want {
			t.Errorf("%s: %q, expected %q: %s", line, e.Cause.Resource, want, e.Cause.Text)
		}
	}
}

// TestHardwareInTheKernelsLog: what the kernel says of hardware that fails counts, and its other errors do not.
func TestHardwareInTheKernelsLog(t *testing.T) {
	for line, want := range map[string]Resource{
		"blk_update_request: I/O error, dev nvme0n1, sector 1843200": Undetermined,
		"amdgpu 0000:c1:00.0: amdgpu: GPU reset begin!":              Undetermined,
		"snd_hda_intel: FATAL: no codec":                             None,
	} {
		e := Explain(Inputs{Sources: []*evidence.Source{readSource(t, "dmesg", []byte("[ 1843.308145] "+line+"\n"))}})
		if e.Cause.Resource != want {
			t.Errorf("%s: %q, expected %q: %s", line, e.Cause.Resource, want, e.Cause.Text)
		}
	}
}

// TestMemoryOfADriver: the kernel's driver of a GPU that lacks memory tells of a failure, and not whose memory it was.
func TestMemoryOfADriver(t *testing.T) {
	const head = "Aug 12 10:11:12 spark-1 kernel: "
	for line, want := range map[string]Resource{
		"NVRM: nvCheckOkFailedNoLog: Check failed: Out of memory [NV_ERR_NO_MEMORY] (0x51)": Undetermined,
		"snd_hda_intel: Check failed: out of memory":                                        None,
	} {
		if e := explainText(t, head+line+"\n"); e.Cause.Resource != want {
			t.Errorf("%s: %q, expected %q: %s", line, e.Cause.Resource, want, e.Cause.Text)
		}
	}
}

// TestHealthyWords: a test that passes says in its name what others die of, and a server that cannot be reached is no
// failure of a program that goes on. Where it does not go on, it may be one.
func TestHealthyWords(t *testing.T) {
	lost := "Traceback (most recent call last):\n  File \"t.py\", line 3, in fetch\n    open_url()\n" +
		"ConnectionRefusedError: [Errno 111] Connection refused\n"
	var steps strings.Builder
	for i := range 12 {
		fmt.Fprintf(&steps, "step %d/12 loss 2.%d\n", i+1, 99-i)
	}
	for text, failed := range map[string]bool{
		"test_abort (t.Tests)\nThis used to segfault with old versions. ... ok\nRan 1 test in 0.1s\n\nOK\n": false,
		"t.py::test_segfault_of_a_worker PASSED   [ 50%]\nt.py::test_memory[Killed] PASSED   [100%]\n":      false,
		"test_abort (t.Tests)\nThis used to segfault.\nSegmentation fault (core dumped)\n":                  true,
		lost + steps.String(): false,
		steps.String() + lost: true,
	} {
		if e := explainText(t, text); (e.Cause.Resource != None) != failed {
			t.Errorf("%q: %q (%s)", text, e.Cause.Resource, e.Cause.Text)
		}
	}
}
