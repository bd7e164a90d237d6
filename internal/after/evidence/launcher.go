package evidence

import (
	"fmt"
	"strconv"
	"strings"

	"plimsoll/internal/base/lazyregexp"
)

// Signals of Linux, whatever system reads about them.
const (
	SIGHUP  = 1
	SIGINT  = 2
	SIGILL  = 4
	SIGABRT = 6
	SIGBUS  = 7
	SIGXFSZ = 25
	SIGFPE  = 8
	SIGKILL = 9
	SIGSEGV = 11
	SIGTERM = 15
)

// SignalName describes a signal of Linux by its number.
func SignalName(signal int) string {
	if signal > 0 && signal < len(signalNames) {
		return signalNames[signal]
	}
	return fmt.Sprintf("signal %d", signal)
}

var signalNames = [...]string{
	1: "hangup", 2: "interrupt", 3: "quit", 4: "illegal instruction", 5: "trace/breakpoint trap", 6: "aborted",
	7: "bus error", 8: "floating point exception", 9: "killed", 10: "user defined signal 1",
	11: "segmentation fault",
	12: "user defined signal 2", 13: "broken pipe", 14: "alarm clock", 15: "terminated", 16: "stack fault",
	17: "child exited", 18: "continued", 19: "stopped (signal)", 20: "stopped", 21: "stopped (tty input)",
	22: "stopped (tty output)", 23: "urgent I/O condition", 24: "CPU time limit exceeded",
	25: "file size limit exceeded", 26: "virtual timer expired", 27: "profiling timer expired", 28: "window changed",
	29: "I/O possible", 30: "power failure", 31: "bad system call",
}

// signals are the numbers of signals by name, as on x86 and arm64.
var signals = map[string]int{
	"HUP": 1, "INT": 2, "QUIT": 3, "ILL": 4, "TRAP": 5, "ABRT": 6, "BUS": 7, "FPE": 8, "KILL": 9, "USR1": 10,
	"SEGV": 11,
	"USR2": 12, "PIPE": 13, "ALRM": 14, "TERM": 15, "XCPU": 24, "XFSZ": 25, "SYS": 31,
	// as strsignal and shells describe them
	"killed": 9, "terminated": 15, "segmentation fault": 11, "bus error": 7, "aborted": 6, "illegal instruction": 4,
	"floating point exception": 8, "abort": 6, "illegal hardware instruction": 4, "hangup": 1,
}

// signalOf returns the number of a signal in any notation, or 0.
func signalOf(s string) int {
	s = strings.TrimSpace(s)
	if n, err := strconv.Atoi(s); err == nil {
		return n
	}
	if n := signals[strings.TrimPrefix(strings.ToUpper(s), "SIG")]; n > 0 {
		return n
	}
	return signals[strings.ToLower(s)]
}

// endOf returns the end of a process with an exit code. A negative one is a signal, as in Python.
func endOf(by string, code int) ProcessEnded {
	f := ProcessEnded{By: by, Rank: NoRank, LocalRank: NoRank, ExitCode: code}
	if code < 0 {
		f.ExitCode, f.Signal = 0, -code
	}
	return f
}

// ended returns the end of a process with what the groups rank, lr, pid, code and sig say.
func ended(by string) func(*match) Fact {
	return func(m *match) Fact {
		f := endOf(by, m.integer("code", 0))
		f.Rank, f.LocalRank = m.integer("rank", m.rank), m.integer("lr", NoRank)
		f.PID = m.integer("pid", 0)
		if signal := signalOf(m.get("sig")); signal != 0 {
			f.Signal = signal
		}
		if f.ExitCode > 255 {
			return nil
		}
		return f
	}
}

func victim(by string) func(*match) Fact {
	return func(m *match) Fact {
		f, _ := ended(by)(m).(ProcessEnded)
		f.Victim = true
		return f
	}
}

func batchKill(by string) func(*match) Fact {
	return func(m *match) Fact {
		return BatchKill{By: by, What: m.get("what"), PID: m.integer("pid", 0), Count: m.integer("n", 0),
			Limit: m.size("limit", 1)}
	}
}

func collective(by string) func(*match) Fact {
	return func(m *match) Fact { return CollectiveFailed{By: by, What: strings.TrimSpace(m.get("what"))} }
}

// launcherPatterns are the texts of launchers, shells and collectives.
var launcherPatterns = []pattern{
	{ // torch/distributed/elastic/multiprocessing/api.py
		name:       "torchrun: a rank failed",
		literals:   []string{"failed (exitcode:"},
		expression: `failed \(exitcode: (?P<code>-?\d+)\) local_rank: (?P<lr>\d+) \(pid: (?P<pid>\d+)\)`,
		kind:       TrainerLog,
		fact: func(m *match) Fact {
			f, _ := ended("torchrun")(m).(ProcessEnded)
			f.First = true
			return f
		},
	},
	{ // torch/distributed/elastic/multiprocessing/api.py
		name:       "torchrun ends a rank",
		literals:   []string{"closing signal"},
		expression: `Sending process (?P<pid>\d+) closing signal (?P<sig>SIG\w+)`,
		kind:       TrainerLog, fact: victim("torchrun"),
	},
	{ // torch/distributed/elastic/agent/server/api.py
		name:       "torchrun starts again",
		literals:   []string{"attempts left; will restart worker group"},
		expression: `Worker group \w+\. (?P<left>\d+)/\d+ attempts left; will restart worker group`,
		kind:       TrainerLog, fact: func(*match) Fact { return Restarted{By: "torchrun"} },
	},
	{ // deepspeed/autotuning/autotuner.py: the experiments before may fail
		name:       "autotuner has a result",
		literals:   []string{"Done tuning", "optimal DeepSpeed config found by autotuning"},
		expression: `\bDone tuning\b|\boptimal DeepSpeed config found by autotuning\b`,
		kind:       TrainerLog, fact: func(*match) Fact { return Restarted{By: "the autotuner"} },
	},
	{ // package launch
		name:     "plimsoll starts again",
		literals: []string{"plimsoll starts all ranks again"},
		expression: `^plimsoll: rank (?P<rank>\d+) (?:was ended by signal (?P<sig>\d+)|` +
			`ended with exit code (?P<code>\d+)).*` +
			`; plimsoll starts all ranks again`,
		kind: TrainerLog,
		take: func(r *reader, m *match) {
			r.emit(m, ended("plimsoll")(m))
			r.emit(m, Restarted{By: "plimsoll"})
		},
	},
	{ // torch/distributed/elastic/multiprocessing/api.py, and agent/server/api.py, which says it first
		name:       "torchrun was ended",
		literals:   []string{"got signal: ", " death signal, shutting down"},
		expression: `(?:SignalException: Process \d+ got signal: |\bReceived )(?P<sig>\d+)(?: death signal, shutting down|\s|$)`,
		kind:       TrainerLog,
		fact: func(m *match) Fact {
			return BatchEnd{By: "torchrun", Reason: "signal " + m.get("sig")}
		},
	},
	{ // torch/distributed/elastic/multiprocessing/errors/__init__.py
		name:       "torchrun: summary",
		literals:   []string{"Root Cause (first observed failure)", "Failures:"},
		expression: `^(?P<root>Root Cause \(first observed failure\):|Failures:)$`,
		kind:       TrainerLog,
		take: func(r *reader, m *match) {
			r.begin(m.stream, &failures{first: strings.HasPrefix(m.get("root"), "Root")})
		},
	},
	{ // torch/distributed/elastic/multiprocessing/errors/__init__.py, where the rest of the summary is cut
		name:       "torchrun: signal",
		literals:   []string{"received by PID"},
		expression: `Signal (?P<sig>\d+) \((?P<signame>\w+)\) received by PID (?P<pid>\d+)`,
		kind:       TrainerLog, fact: ended("torchrun"),
	},
	{ // torch/multiprocessing/spawn.py
		name:       "spawn: a rank ended",
		literals:   []string{"terminated with signal", "terminated with exit code"},
		expression: `process (?P<rank>\d+) terminated with (?:signal (?P<sig>SIG\w+)|exit code (?P<code>\d+))`,
		kind:       TrainerLog, fact: ended("torch.multiprocessing"),
	},
	{ // lightning/fabric/strategies/launchers/subprocess_script.py: it looks at all ranks of the node
		name:       "Lightning: a rank ended",
		literals:   []string{"Child process with PID"},
		expression: `Child process with PID (?P<pid>\d+) terminated with code (?P<code>-?\d+)\.`,
		kind:       TrainerLog,
		fact: func(m *match) Fact {
			f, ok := ended("Lightning")(m).(ProcessEnded)
			f.First = ok
			return f
		},
	},
	{ // torch/multiprocessing/spawn.py: the parent repeats the traceback of a rank
		name:       "spawn: error of a rank",
		literals:   []string{"terminated with the following error"},
		expression: `^-- Process (?P<rank>\d+) terminated with the following error:`,
		kind:       TrainerLog,
		take:       func(_ *reader, m *match) { m.stream.rank = m.integer("rank", NoRank) },
	},
	{ // torch/csrc/distributed/c10d/ProcessGroupNCCL.cpp
		name:       "NCCL: error of CUDA",
		literals:   []string{"watchdog thread terminated with exception: CUDA error"},
		expression: `watchdog thread terminated with exception: CUDA error: (?P<what>.*)`,
		kind:       TrainerLog,
		fact:       func(m *match) Fact { return Exception{Type: "CUDA error", Message: m.get("what")} },
	},
	{ // the runtime of ROCm, for an access to memory that is not mapped
		name:       "HIP: memory access fault",
		literals:   []string{"Memory access fault by GPU"},
		expression: `Memory access fault by GPU (?P<what>.*)`,
		kind:       TrainerLog,
		fact: func(m *match) Fact {
			return Exception{Type: "memory access fault by GPU", Message: m.get("what")}
		},
	},
	{ // deepspeed/launcher/launch.py: the command is that of the last rank of the node, whichever one has ended
		name:       "DeepSpeed: a rank ended",
		literals:   []string{"exits with return code ="},
		expression: `exits with return code = (?P<code>-?\d+)`,
		kind:       TrainerLog, fact: ended("DeepSpeed"),
	},
	{ // deepspeed/launcher/launch.py
		name:       "DeepSpeed was ended",
		literals:   []string{"Main process received"},
		expression: `Main process received (?P<sig>SIG\w+), exiting`,
		kind:       TrainerLog,
		fact:       func(m *match) Fact { return BatchEnd{By: "DeepSpeed", Reason: "signal " + m.get("sig")} },
	},
	{ // vllm/v1/engine/core.py
		name:       "vLLM was ended",
		literals:   []string{"trigger received signal="},
		expression: `\[shutdown\] \w+: trigger received signal=(?P<sig>SIG\w+)`,
		kind:       TrainerLog,
		fact: func(m *match) Fact {
			return BatchEnd{By: "vLLM", Reason: "signal " + m.get("sig"), Orderly: true}
		},
	},
	{ // sglang/srt/managers/tokenizer_manager.py
		name:       "SGLang was ended",
		literals:   []string{"SIGTERM received."},
		expression: `^SIGTERM received\. .*Draining requests and shutting down`,
		kind:       TrainerLog,
		fact:       func(*match) Fact { return BatchEnd{By: "SGLang", Reason: "signal SIGTERM", Orderly: true} },
	},
	{ // git/exc.py of GitPython, which Weights & Biases catches: a command that is not the job's
		name:       "GitPython: a command failed",
		literals:   []string{"Cmd('git') failed due to"},
		expression: `Cmd\('git'\) failed due to: exit code\(\d+\)`,
		kind:       TrainerLog, fact: func(*match) Fact { return nil },
	},
	{ // CPython: Lib/argparse.py
		name:     "argparse: a wrong argument",
		literals: []string{": error: "},
		expression: `^\S+: error: (?P<what>(?:argument|unrecognized arguments|ambiguous option|` +
			`the following arguments are required|one of the arguments)\b.*)`,
		kind: TrainerLog,
		fact: func(m *match) Fact { return Exception{Type: "argparse.ArgumentError", Message: m.get("what")} },
	},
	{ // vllm/v1/utils.py, vllm/v1/engine/utils.py, sglang: a parent's word on a process that it had started
		name:       "engine process ended",
		literals:   []string{"Failed core proc(s)"},
		expression: `Failed core proc\(s\): \{(?:.*?: (?P<code>-?\d+))?`,
		kind:       TrainerLog, picky: true,
		fact: func(m *match) Fact {
			if m.get("code") == "" { // it does not say how
				return nil
			}
			return ended("vLLM")(m)
		},
	},
	{ // Python's subprocess, as accelerate and others raise it
		name:     "command ended",
		literals: []string{"died with <Signals.", "returned non-zero exit status"},
		expression: `Command .*(?:died with <Signals\.(?P<sig>SIG\w+): \d+>|` +
			`returned non-zero exit status (?P<code>\d+))`,
		kind: TrainerLog, fact: ended("subprocess"),
	},
	{ // Open MPI: orte/tools/orterun, prte
		name:     "mpirun: a rank ended",
		literals: []string{"noticed that process rank", "exited on signal"},
		expression: `noticed that process rank (?P<rank>\d+) with PID (?P<pid>\d+) on node \S+ exited ` +
			`on signal (?P<sig>\d+)`,
		kind: TrainerLog, wrapped: true, fact: ended("mpirun"),
	},
	{ // Hydra: MPICH, Intel MPI
		name:       "mpiexec: a rank ended",
		literals:   []string{"KILLED BY SIGNAL:", "EXIT CODE:"},
		expression: `=\s+(?:KILLED BY SIGNAL: (?P<sig>\d+)|EXIT CODE: (?P<code>\d+))`,
		kind:       TrainerLog, fact: ended("mpiexec"),
	},
	{ // package launch
		name:     "plimsoll: a rank ended",
		literals: []string{"was ended by signal", "ended with exit code"},
		expression: `^plimsoll: rank (?P<rank>\d+) (?:was ended by signal (?P<sig>\d+)|` +
			`ended with exit code (?P<code>\d+))`,
		kind: TrainerLog, fact: ended("plimsoll"),
	},
	{ // package host
		name:     "plimsoll: the kernel killed",
		literals: []string{"the kernel's OOM killer killed it"},
		expression: `the kernel's OOM killer killed it \((?P<what>[^)]*)\)` +
			`(?:; the limit of (?P<limit>[\d.]+ [KMGT]?i?B) of (?P<group>.+) was reached)?`,
		kind: TrainerLog, fact: batchKill("plimsoll"),
	},
	{ // cmd/plimsoll
		name:       "plimsoll: does not fit",
		literals:   []string{"the job does not fit:"},
		expression: `^plimsoll: the job does not fit: .*nothing was started`,
		kind:       TrainerLog,
		fact:       func(*match) Fact { return BatchEnd{By: "plimsoll", Reason: "the plan does not fit"} },
	},
	{ // bash: a script's line, a job of an interactive shell, or the signal alone
		name:     "shell: a process ended",
		literals: []string{"Killed", "killed", "Terminated", "Segmentation fault", "Aborted"},
		expression: `^(?:\S+: line \d+: +(?P<pid>\d+) |\S+: line \d+: |\[\d+\][+-]? +(?:(?P<pid2>\d+) )?|)` +
			`(?P<sig>Killed|killed|Terminated|Segmentation fault|Aborted)(?: +\(core dumped\))?(?: {2,}.*|: \d+)?$`,
		kind: TrainerLog,
		fact: func(m *match) Fact {
			f := ProcessEnded{By: "shell", Rank: m.rank, LocalRank: NoRank, Signal: signalOf(m.get("sig"))}
			f.PID = m.integer("pid", m.integer("pid2", 0))
			return f
		},
	},
	{ // zsh
		name:     "zsh: a process ended",
		literals: []string{"zsh: "},
		expression: `^zsh: (?P<sig>killed|abort|segmentation fault|bus error|terminated|` +
			`illegal hardware instruction|hangup)\b`,
		kind: TrainerLog, fact: ended("shell"),
	},
	{ // what a terminal shows of Ctrl-C
		name:       "terminal: interrupted",
		literals:   []string{"^C"},
		expression: `^(?:\^C)+$`,
		kind:       TrainerLog,
		fact: func(*match) Fact {
			return ProcessEnded{By: "terminal", Rank: NoRank, LocalRank: NoRank, Signal: SIGINT}
		},
	},
	{ // make and other programs that name the signal, and shells that say it behind the number of a process
		name: "a signal by its number",
		literals: []string{"erminated by signal", "illed by signal", "aught signal", "signal: killed", "xited " +
			"on signal", "died due to signal"},
		expression: `\b(?:[Tt]erminated by|[Kk]illed by|[Cc]aught|[Ee]xited on|died due to) signal:? (?P<sig>\d{1,2}|` +
			`SIG[A-Z]+)\b|` +
			`\bsignal: (?P<sig2>killed)$`,
		kind: TrainerLog,
		fact: func(m *match) Fact {
			f, _ := ended("shell")(m).(ProcessEnded)
			if m.get("sig2") != "" {
				f.Signal = SIGKILL
			}
			return f
		},
	},
	{ // glibc: malloc/malloc.c, debug/fortify_fail.c; tcmalloc. Input methods widen parentheses in what people copy.
		name: "glibc aborts",
		literals: []string{"free(): ", "lloc(): ", "_chunk(): ", "consolidate(): ", "double free or corruption",
			"corrupted size vs. prev_size", "corrupted double-linked list", " detected ***: terminated",
			"Attempt to free invalid pointer"},
		expression: `\b(?P<what>(?:(?:free|malloc|realloc|munmap_chunk|mremap_chunk|malloc_consolidate)\(\): ` +
			`(?:invalid|corrupted|double free|memory corruption|mismatching|unaligned|unsorted|smallbin|largebin)|` +
			`double free or corruption ?[(（]|corrupted (?:size vs\. prev_size|double-linked list)|` +
			`Attempt to free invalid pointer 0x).*)|` +
			`\*\*\* (?P<smashed>(?:stack smashing|buffer overflow) detected) \*\*\*: terminated`,
		kind: TrainerLog,
		fact: func(m *match) Fact {
			return Exception{Type: "an abort of the C library", Message: m.get("what") + m.get("smashed")}
		},
	},
	{ // CPython: Modules/faulthandler.c
		name:     "faulthandler",
		literals: []string{"Fatal Python error:"},
		expression: `Fatal Python error: (?P<sig>Segmentation fault|Aborted|Illegal instruction|` +
			`Floating point exception)`,
		kind: TrainerLog, fact: ended("Python"),
	},
	{ // torch/csrc/distributed/c10d/ProcessGroupNCCL.cpp
		name: "NCCL watchdog",
		literals: []string{"Timeout at NCCL work", "collective operation timeout",
			"NCCL operations have failed or timed out",
			"Heartbeat monitor"},
		expression: `(?:\[?[Rr]ank (?P<rank>\d+)\]? ?)?(?P<what>Watchdog caught collective operation timeout.*|` +
			`Timeout at NCCL work.*|` +
			`Some NCCL operations have failed or timed out|.*Heartbeat monitor timed out)`,
		kind: TrainerLog, fact: collective("NCCL"),
	},
	{ // NCCL: what it says of an error of a system call
		name:     "NCCL: a call failed",
		literals: []string{"NCCL WARN"},
		expression: `NCCL WARN (?P<what>.*(?:No such file or directory|Permission denied|Operation not permitted|` +
			`Invalid argument|No such device|Address already in use|Protocol not supported).*)`,
		kind: TrainerLog,
		fact: func(m *match) Fact { return Exception{Type: "an error in NCCL", Message: m.get("what")} },
	},
	{ // NCCL: src/transport/net_socket.cc, src/misc/socket.cc; torch/csrc/distributed/c10d/NCCLUtils.hpp
		name: "NCCL: peer gone",
		literals: []string{
			"ncclRemoteError", "by remote peer", "ncclSystemError", "ncclInternalError",
			"NCCL communicator was aborted", "NCCL WARN", "DistBackendError: NCCL error",
			"Got completion ",
		},
		expression: `(?P<what>ncclRemoteError|ncclSystemError|ncclInternalError|Connection closed by remote peer|` +
			`DistBackendError: NCCL error.*unhandled system error|` +
			`NCCL communicator was aborted|NCCL WARN .*(?:Connection reset by peer|Connection refused|` +
			`Broken pipe|timed out)|Got completion (?:from peer \S+ )?with (?:status=|error )(?:[1-9]\d*)\b.*)`,
		kind: TrainerLog, fact: collective("NCCL"),
	},
	{ // gloo/transport/tcp/pair.cc: a rank and its peer are in two collectives, or of two sizes
		name:       "gloo: another collective",
		literals:   []string{"distributed collective mismatch"},
		expression: `(?P<what>Received data size doesn't match expected size)\. Is there a distributed collective mismatch`,
		kind:       TrainerLog,
		fact: func(m *match) Fact {
			return Exception{Type: "gloo::EnforceNotMet", Message: m.get("what") + ": ranks call different collectives"}
		},
	},
	{ // gloo/transport/tcp/pair.cc, unbound_buffer.cc
		name: "gloo: peer gone",
		literals: []string{"gloo/transport", "Connection closed by peer [", "ms for recv operation",
			"ms for send operation"},
		expression: `(?:gloo/transport\S+\] (?P<what>.*)|(?P<other>Connection closed by peer \[|` +
			`Timed out waiting \d+ms for (?:recv|send) operation))`,
		kind: TrainerLog, fact: collective("gloo"),
	},
	{ // torch/csrc/distributed/c10d/TCPStore.cpp, socket.cpp
		name: "store: peer gone",
		literals: []string{
			"recvValue failed", "failed to recv, got 0 bytes", "DistStoreError",
			"RendezvousConnectionError", "sendBytes failed",
			"recvVector failed",
		},
		expression: `(?P<what>(?:recvValue|recvVector|sendBytes) failed.*|failed to recv, got 0 bytes|` +
			`DistStoreError: .*|` +
			`RendezvousConnectionError.*)`,
		kind: TrainerLog, fact: collective("TCPStore"),
	},
	{ // what shells, containers and CI systems say of the end
		name: "exit code",
		literals: []string{
			"exit code", "exit status", "Exited (", "rc=", "rc:", "exited with", "non-zero status",
			"return code", "exitcode",
			"ExitCode", "EXIT_CODE", "Exit Code", "Exit code", "returncode",
		},
		expression: `(?i:\b(?:exit(?:ed)?(?: with)?(?: non-zero)?(?: exit)?[ _]?(?:(?:status )?code|status)|` +
			`exited(?: with)?|non-zero status|` +
			`return ?code|(?P<rc>rc))(?: is| was)?[ =:(]*(?P<code>-?\d{1,3})(?:['".,;:)\]}]|\s*$|\s+(?:ago|at|` +
			`after|on|from|in|during|while|completed|\(|-)))`,
		kind: TrainerLog,
		fact: func(m *match) Fact {
			if m.get("rc") != "" && strings.HasPrefix(m.get("code"), "-") && m.get("code") != "-9" {
				return nil // what a function returns, and no process
			}
			if m.get("code") == "0" && helper.MatchString(m.whole) {
				return nil // a helper that ends well says nothing of the job
			}
			return ended("shell")(m)
		},
	},
	{ // GNU make, just, Weights & Biases, and scripts that print "$?"
		name:     "runner: a command ended",
		literals: []string{"] Error ", "was terminated on line", "Program failed with code", "exit="},
		expression: `(?:make(?:\[\d+\])?: \*\*\* \[.*\] Error |Program failed with code |` +
			`\bexit=)(?P<code>\d{1,3})[.\s]*$|` +
			`error: Recipe .* was terminated on line \d+ by signal (?P<sig>\d{1,2})`,
		kind: TrainerLog, fact: ended("shell"),
	},
	{ // a session of a shell: a command that starts a training
		name: "shell: a command",
		literals: []string{"python", "torchrun", "accelerate launch", "deepspeed ", "srun ", "llamafactory-cli",
			"swift sft", "axolotl train", "tune run"},
		expression: `^(?:\([\w.-]+\) ?)?(?:[\w.-]+@\S+?)?\S{0,80}[$#%>] (?:[A-Z_]+=\S+ +)*` +
			`(?P<what>(?:python[\d.]*|torchrun|` +
			`accelerate launch|deepspeed|srun|llamafactory-cli|swift sft|axolotl train|tune run) \S+)`,
		kind: TrainerLog, fact: func(m *match) Fact { return Started{What: m.get("what")} },
	},
	{ // a session of a shell
		name:       "shell: the exit code, asked for",
		literals:   []string{"echo $?"},
		expression: `^\S*[$#%>] ?echo \$\?$`,
		kind:       TrainerLog,
		take:       func(r *reader, m *match) { r.begin(m.stream, askedCode{}) },
	},
}

// helper are processes beside those of the job.
var helper = lazyregexp.New(`(?i)\b(?:agent|daemon|dashboard|sidecar|helper|watchdog)\b`)

// askedCode is the line after "echo $?".
type askedCode struct{}

var codeAlone = lazyregexp.New(`^\d{1,3}$`)

func (askedCode) line(r *reader, t *text) bool {
	if !codeAlone.MatchString(t.string) {
		return false
	}
	r.add(t, endOf("shell", atoi(t.string)))
	return true
}

func (askedCode) end(*reader) {}

// failures are the ranks in torchrun's summary.
type failures struct {
	first bool // the block of the root cause
	at    text
	fact  ProcessEnded
	known bool
}

var failureLine = lazyregexp.New(`^\s*(?:\[\d+\]:|<NO_OTHER_FAILURES>|-+|=+|(time|host|rank|exitcode|` +
	`error_file|traceback) *: (.*))\s*$`)

var (
	failureRank = lazyregexp.New(`^(\d+) \(local_rank: (\d+)\)`)
	failureCode = lazyregexp.New(`^(-?\d+) \(pid: (\d+)\)`)
)

func (b *failures) line(r *reader, t *text) bool {
	groups := failureLine.FindStringSubmatch(t.string)
	if groups == nil {
		return false
	}
	switch groups[1] {
	case "traceback":
		return !strings.HasPrefix(groups[2], "Traceback") // which is read as such
	case "": // the next rank
		b.end(r)
	case "time":
		b.at.time = strings.Replace(groups[2], "_", "T", 1)
	case "rank":
		if g := failureRank.FindStringSubmatch(groups[2]); g != nil {
			b.fact.Rank, b.fact.LocalRank = atoi(g[1]), atoi(g[2])
		}
	case "exitcode":
		if g := failureCode.FindStringSubmatch(groups[2]); g != nil {
			end := endOf("torchrun", atoi(g[1]))
			b.fact.ExitCode, b.fact.Signal, b.fact.PID = end.ExitCode, end.Signal, atoi(g[2])
			when := b.at.time
			b.at, b.known = *t, true
			b.at.time = when
		}
	}
	return true
}

func (b *failures) end(r *reader) {
	if b.known {
		b.fact.By, b.fact.First = "torchrun", b.first
		b.fact.Victim = b.fact.Signal == signals["TERM"] && !b.first
		b.at.rank = b.fact.Rank
		r.kinds[TrainerLog]++
		r.add(&b.at, b.fact)
	}
	*b = failures{first: b.first, fact: ProcessEnded{Rank: NoRank, LocalRank: NoRank}}
}
