package evidence

import (
	"cmp"
	"slices"
	"strings"

	"plimsoll/internal/base/lazyregexp"
)

// Facts of lines that speak of a failure, or of one that was overcome.
type (
	// Sign is a line that speaks of a failure that no other fact explains.
	Sign struct {
		What   string
		Memory bool // it speaks of missing memory, and not of which
		Faint  bool // programs that go on print such lines, too
		Reach  int  // how many lines before the end of a file it counts; 0 for all
	}

	// TooManyFiles is EMFILE or ENFILE.
	TooManyFiles struct{}

	// Handled is a program's word that it has dealt with the error before.
	Handled struct{ What string }
)

// Says says it.
func (f Sign) Says() string {
	switch {
	case f.Memory:
		return sentence("the line speaks of missing memory, and not of which", f.What)
	case f.Faint:
		return sentence("the line speaks of an error that nothing explains", f.What)
	}
	return sentence("the line speaks of a failure that nothing explains", f.What)
}

// Says says it.
func (TooManyFiles) Says() string {
	return "the kernel refused another file descriptor: their number is limited"
}

// Says says it.
func (f Handled) Says() string { return sentence("the program has dealt with an error", f.What) }

// codeSign and hardwareSign are the names of the patterns of vendors' codes and of hardware that fails.
const (
	codeSign     = "sign of a code"
	hardwareSign = "sign of broken hardware"
)

// signPatterns are lines that speak of a failure in words that many programs share. They count where a line has no fact
// of its own.
var signPatterns = []pattern{
	{ // the words in which runtimes speak of their end
		name: "sign of an end",
		literals: []string{"terminate called", "terminating due to", "erminated by signal", "signal: ", "panic: ",
			"fatal error: ", "Fatal error", "FATAL", "Fatal Python error", "INTERNAL ASSERT FAILED", "Check failed",
			"unrecoverable"},
		expression: `\bterminate called\b|\bterminating due to\b|\b[Tt]erminated by signal\b|` +
			`\bsignal: (?:killed|aborted|segmentation fault|terminated)|^(?:\S+ )?panic: |` +
			`\b[Ff]atal error(?:: |\b.*:)|\bFATAL(?: ERROR)?\b|Fatal Python error|INTERNAL ASSERT FAILED|` +
			`\bCheck failed: |\bunrecoverable\b`,
		kind: Unknown, fact: signOf(0),
	},
	{ // the words in which shells and frameworks speak of the end of another process
		name: "sign of a death",
		literals: []string{"ore dumped", "died", "crashed", "killed", "Killed", "bort", "SIGABRT", "SIGKILL", "SIGSEGV",
			"Terminated", "NodeDied", "is dead", "ead kernel", "ernel died", "anceled future", "panicked at", "egfault",
			"Segmentation fault", "EXIT STRING", "eceived ", "sending signal", "dead or unavailable", "evice " +
				"lost", "DEVICE_LOST", "DeviceLost", "has been lost", "unexpectedly failed", "Abort trap", "_ASSERT"},
		expression: `\([Cc]ore dumped\)|\bdied unexpectedly\b|\bunexpectedly failed\b|` +
			`\bAbort trap: 6|\b[A-Z]{2,}_ASSERT(?:\(|: )|\b(?:has|have) died\b|\bcrashed\b|` +
			`\b[Dd]ead kernel\b|\b[Kk]ernel died\b|` +
			`[Cc]anceled future for execute_request|\bpanicked at\b|\b[Ss]egfault|\bSegmentation fault\b|` +
			`EXIT STRING: |` +
			`\b[Rr]eceived (?:death )?signal:? \d|\bsending signal (?:KILL|TERM)\b|` +
			`\b(?:[Ww]as|got|been) killed\b|^[Aa]borted\b|\bzsh: abort\b|\bSIG(?:ABRT|KILL|SEGV)\b|` +
			`(?:^|[\]|>) ]\s*)(?:Killed|Terminated|Aborted)\s*$|\bNodeDied\w*|` +
			`\b(?:actor|node|worker|engine|process)\b.* is dead\b|\bdead or unavailable\b|` +
			`(?i:\bdevice[ _]?(?:has been )?lost\b)`,
		kind: Unknown, fact: signOf(0),
	},
	{ // deepspeed/launcher/launch.py, which kills all ranks; shells; kubectl get pods
		name: "sign of a launcher",
		literals: []string{"Killing subprocess", "Killed ", "Error", "BackOff", "Err", "Container", "Signal:",
			"ExitCode:"},
		expression: `Killing subprocess \d+|^Killed \S*python|^\s*(?:\S+\s+){1,2}\d+/\d+\s+(?:Init:)?` +
			`(?:\w*Error|\w*BackOff|Err\w+|ContainerStatusUnknown|ContainerCannotRun|Signal:\d+|ExitCode:\d+)` +
			`\s+\d+\s`,
		kind: Unknown, fact: signOf(0),
	},
	{ // libc's assert of BSD and macOS; workers of Dask; zsh's word on a job, behind a line that has not ended
		name:     "sign of an assertion",
		literals: []string{"Assertion failed: ", " abort  ", " killed  ", " segmentation fault  ", " died"},
		expression: `\bAssertion failed: |\bdied: |\bworkers? died\b|` +
			`\[\d+\] +[+-]? *\d+ (?:abort|killed|segmentation fault) {2,}`,
		kind: Unknown, fact: signOf(0),
	},
	{ // Linux: drivers of memory, disks and GPUs. The job may have got through it.
		name: hardwareSign,
		literals: []string{"Machine Check Exception", " UE memory ", "I/O error, dev ", "GPU reset begin",
			"ring gfx timeout", "Engine reset"},
		expression: `Machine Check Exception|\bEDAC \S+ \d+ UE memory|\bI/O error, dev \w+|\bGPU reset begin|` +
			`\bring \S+ timeout|\bEngine reset\b`,
		kind: Unknown, fact: signOf(0),
	},
	{ // codes of vendors, and codes that are not 0
		name: codeSign,
		literals: []string{"_ERROR", "_STATUS_", "_RESULT_", "Error_t", "rror code", "rror: ", "rrno", "ret=",
			"status ", "NVRM", "Xid",
			"ECC", "EI0", "EL0", "EE9", "EZ9", "ACL", "NRT:", "TDRV:", "CNRT", "synStatus", "CUresult", "hipError",
			"cudaError", "CL_", "xit code", "ERR!", "ot found", "initialization error", "borted:",
			"xceeded", "OOMKilled"},
		expression: `\b(?:[A-Z][A-Z0-9]*_)+(?:ERROR|FAILED|FAILURE|LOST)(?:_[A-Z0-9_]+)?\b|\b[A-Z]+_(?:STATUS|` +
			`RESULT)_[A-Z_]*(?:ERR|FAIL|LOST|INVALID)\w*|` +
			`\b[Ee]rror code\b\D{0,12}-?[1-9]\d*|\b(?:hip|cuda|musa|cn|mc)Error[A-Z]\w+|` +
			`\bCUresult error\b|\bret=-[1-9]|\bXid \(?[\w:. ,()]*\)?: ?\d+|\bNVRM: .*(?:fail|error|fallen)|` +
			`(?i:uncorrect(?:able|ed) ECC)|\bE[A-Z]\d{4}: |\bACL\w* .*(?:error|fail)|` +
			`\bERROR +(?:TDRV|NRT|NMGR|HAL):|\bsynStatus\w*(?:Fail|Error|OutOf)\w*|\bCNRT\w*(?:error|ERROR|FAIL)\w*|` +
			`\b[Ee]xit code -?[1-9]\d{3,}|\bERR! code [1-9]|: (?:command )?not found$|` +
			`\binitialization error\b|\baborted: |` +
			`\bsynStatus=[1-9]|\bexceeded (?:\S+ ){0,3}memory\b|^\s*OOMKilled\b`,
		kind: Unknown, fact: signOf(0),
	},
	{ // the last line of a traceback whose beginning is missing, and exceptions of other languages
		name: "sign of an exception",
		literals: []string{"Error", "Exception", "exception", "Interrupt", "Exit", "Invalid", "Failure",
			"untime error ", "xceptions.", "rrors.", "errorfactory.", "KilledWorker", "StopIteration",
			"nhandled error"},
		expression: `^(?:\S+ ){0,6}?(?:[Uu]ncaught (?:exception )?|[Uu]nhandled (?:exception:? )?)?` +
			`(?:[A-Za-z_]\w*(?:\.|::))*(?:Exception|KilledWorker|StopIteration|` +
			`[A-Z]\w*(?:Error|Exception|Interrupt|Exit|Invalid|Failure))(?:: .*|\s*$)|` +
			`^(?:\w+\.)+(?:exceptions?|errors?|errorfactory)\.[A-Z]\w*(?:: .*|\s*$)|` +
			`\b(?:[Uu]ncaught|[Uu]nhandled) (?:exception|error)\b|` +
			`\[[A-Z]\w*(?:Error|Exception)\] : \d+ : |\b[Rr]untime error \d+: `, // the latter two of ONNX Runtime
		kind: Unknown, fact: signOf(exceptionReach),
	},
	{ // words for missing memory
		name: "sign of missing memory",
		literals: []string{"memory", "Memory", "MEMORY", "OOM", "lloc", "ALLOC", "RESOURCE_EXHAUSTED",
			"OutOf", "OUT_OF"},
		expression: lackOfMemory,
		kind:       Unknown,
		fact: func(m *match) Fact {
			if !isError(m.whole) && len(m.whole) > shortLine || supposes.MatchString(m.whole) {
				return nil
			}
			return Sign{What: m.whole[m.indices[0]:m.indices[1]], Memory: true}
		},
	},
	{ // levels of loggers
		name: "sign of an error",
		literals: []string{"ERROR", "CRITICAL", "Error", "error:", "failed", "Failed", "FAILED", "nsuccessful",
			"process disappeared", "[E:", "on-zero status code", "'Connection aborted.'"},
		expression: `\b(?:ERROR|CRITICAL)\b|^(?:\w+: )?(?:[Ee]rror|fatal): |\bfailed (?:to|with)\b|^Failed\b|` +
			`: Failed\. Reason: |\bprocess disappeared\b|` +
			`\b[Uu]nsuccessful\b|\bstatus['"]?[:=] ?['"]?failed\b|\[E:\w+|\b[Nn]on-zero status code returned\b|` +
			`\('Connection aborted\.', `,
		kind: Unknown, fact: signOf(faintReach),
	},
}

func signOf(reach int) func(*match) Fact {
	return func(m *match) Fact {
		if supposes.MatchString(m.sentence()) || overcome.MatchString(m.whole) || m.isVariable() ||
			calm.MatchString(m.whole) {
			return nil
		}
		found := m.whole[m.indices[0]:m.indices[1]]
		return Sign{What: found[:min(len(found), 80)], Faint: reach == faintReach, Reach: reach,
			Memory: lackText.MatchString(m.whole) && isError(m.whole)}
	}
}

// calm are lines that a logger of glog's form, as Ray's and PyTorch's are, marks as information or a warning, counts
// that are 0, and names of things for errors.
var calm = lazyregexp.New(`^(?:[IW] \d+ \d+\] |\[?[IW]\d{4} \d\d:\d\d:)|\bfailed\b.*[:=] ?0$|` +
	`^[A-Z]+(?:_[A-Z]+)*_ERROR(?:_[A-Z]+)*_(?:CHANNEL|TOPIC|QUEUE)$`)

// isVariable reports whether a match is the name of a variable of the environment, such as HYDRA_FULL_ERROR.
func (m *match) isVariable() bool {
	before, after := m.whole[:m.indices[0]], m.whole[m.indices[1]:]
	return strings.HasPrefix(after, "=") || strings.HasSuffix(before, "variable ") ||
		strings.HasSuffix(before, "--env=")
}

// shortLine is the length of a line that has no room for advice.
const shortLine = 40

// lackOfMemory is how programs say that memory is missing.
const lackOfMemory = `(?i:out[ _-]?of[ _-]?(?:\w+[ _-]){0,2}(?:device|host|gpu)?[ _-]?memory|\b(?:not enough|` +
	`insufficient|no|lack of)(?: \w+){0,2} memory\b|` +
	`memory (?:\w+ ){0,2}(?:not enough|isn't enough|is not enough|exhausted|insufficient)|RESOURCE_?EXHAUSTED|` +
	`\b(?:failed|unable|could not|cannot|can't|not able) (?:to )?(?:\w+ )?(?:c|m|re)?alloc(?:ate)?\b|` +
	`\b\w*alloc\w*:? (?:[^ :]+ ){0,4}(?:failed|failure)|memory of \d+ is smaller than requested|(?:attempting|` +
	`trying) to allocate\b.*\b(?:greater|more|larger) than\b|\bmore than (?:the )?total mem(?:ory)?\b|` +
	`\bnot enough space in the buffer\b|\bOOM\b)`

var (
	lackText = lazyregexp.New(lackOfMemory)
	// errorText is what lines of errors have, and those of advice do not.
	errorText = lazyregexp.New(`[Ee]rror|ERROR|\bE(?:XXX)?\d{4}\b|FATAL|[Ff]atal|[Ee]xception|EXCEPTION|` +
		`[Ff]ail(?:ed|ure)|FAILED|panic|` +
		`\bwhat\(\)|abort|terminat|EXHAUSTED|Exhausted|NCCL WARN|exhausted`)
	// supposes are words of lines that speak of errors that may be, or that were no errors.
	supposes = lazyregexp.New(`(?i)\b(?:if|may|might|could cause|can cause|to avoid|avoids?|prevents?|in case|` +
		`potential(?:ly)?|possibly|(?:possible|common|usual) (?:root )?(?:causes?|reasons?)|probably|likely|` +
		`suggest\w*|consider|should you|` +
		`warning|warn|deprecated|no errors?|0 errors?|error(?:s|_rate| rate)?[:= ]+(?:0|[\d.]*\.\d+)\b|` +
		`without errors?|errors=|` +
		`ignor(?:e|ed|ing)|skip(?:ped|ping)|retrying|(?:will|to) retry|fall(?:ing)? ?back|no allocation|never|` +
		`not found, using|optional|SIG(?:TERM|KILL) when)\b`)
)

// overcome are words of a line, wherever they stand, after which the program goes on.
var overcome = lazyregexp.New(`(?i)\b(?:warning|warn|deprecated|no errors?|0 errors?|ignor(?:e|ed|ing)|` +
	`skip(?:ped|ping)|retrying|(?:will|to) retry|retry \d+/\d+|fall(?:ing)? ?back|optional)\b`)

// sentence returns the sentence that a match begins in, of a line that may have several.
func (m *match) sentence() string {
	begin, end := 0, len(m.whole)
	if i := strings.LastIndex(m.whole[:m.indices[0]], ". "); i >= 0 {
		begin = i + 2
	}
	if i := strings.Index(m.whole[m.indices[0]:], ". "); i >= 0 {
		end = m.indices[0] + i
	}
	return m.whole[begin:end]
}

func isError(line string) bool {
	return errorText.MatchString(line) && !strings.Contains(line, "NCCL INFO")
}

// handledPatterns are words with which programs say that an error was none for them.
var handledPatterns = []pattern{
	{ // torch/_inductor/select_algorithm.py and others that try again or do without
		name: "an error was handled",
		literals: []string{"gnoring this", "etrying", "alling back", "kipping", "ill retry", "ill be retried",
			"ontinuing", "ecovered from",
			"ecover from"},
		expression: `(?i:\bignoring this \w+|\bretrying\b|\bfalling back (?:to|on)\b|\bskipping (?:this |the |` +
			`current )?(?:batch|update|step|sample|choice|config|candidate)\b|` +
			`\bwill (?:be )?retr(?:y|ied)\b|\bcontinuing (?:anyway|without|with)\b|\b(?:recovered|` +
			`attempting to recover) from\b)`,
		kind: Unknown, handled: true,
		fact: func(m *match) Fact { return Handled{What: m.whole[m.indices[0]:m.indices[1]]} },
	},
}

// heldSigns are the signs of a file since it has gone on for the last time.
type heldSigns struct {
	list  []Finding
	steps []int // of the file, when each sign was found
	step  int   // how many steps the file has shown
	// late are lines that may be signs, the last ones, in a file that has too many of them to look at each.
	late   [lateSigns]lateSign
	looked int // how many lines that may be signs there were
}

// lateSign is a line that may be a sign.
type lateSign struct {
	line         []byte
	number, step int
}

const (
	// eagerSigns is how many lines that may be signs are looked at one by one. Of the others the last ones count.
	eagerSigns = 2000
	lateSigns  = 64
)

// delays keeps a line that may be a sign for the end. It reports whether it does.
func (h *heldSigns) delays(line []byte, number int) bool {
	if h.looked++; h.looked <= eagerSigns {
		return false
	}
	l := &h.late[h.looked%lateSigns]
	l.line = append(l.line[:0], line[:min(len(line), longestShown)]...)
	l.number, l.step = number, h.step
	return true
}

// notice takes what a line speaks of. One that may begin a wrapped text counts if it begins none.
func (r *reader) notice(s *stream, t *text, wrapped bool) {
	for _, hit := range r.hits {
		p := r.index.patterns[hit]
		if !p.sign {
			continue
		}
		m := p.in(t.string)
		if m == nil || p.fact(m) == nil {
			continue
		}
		m.text, m.stream = *t, s
		if wrapped {
			s.wrapped.sign = m
		} else {
			r.sign(t, m)
		}
		return
	}
}

// delayed looks at the lines that were kept for the end.
func (r *reader) delayed() {
	h := &r.signs
	step := h.step
	for i := range h.late {
		l := &h.late[(h.looked+1+i)%lateSigns]
		if l.number == 0 || step-l.step >= stepsAfter || r.hasFinding(l.number) {
			continue
		}
		h.step = l.step
		r.index.find(l.line, &r.hits)
		t := clean(string(l.line), l.number)
		r.notice(r.stream(t.stream), &t, false)
	}
	h.step = step
}

// hasFinding reports whether a line has a finding.
func (r *reader) hasFinding(number int) bool {
	return slices.ContainsFunc(r.source.Findings, func(f Finding) bool { return f.Number == number })
}

const (
	mostSigns = 16
	// stepsAfter is after how many later steps a line of an error counts as overcome.
	stepsAfter = 2
	// faintReach and exceptionReach are how many lines before the end of a file a faint sign counts, and an exception
	// without calls.
	faintReach     = 40
	exceptionReach = 150
)

// sign takes what a line without other facts says of a failure.
func (r *reader) sign(t *text, m *match) {
	fact := m.pattern.fact(m)
	if fact == nil {
		return
	}
	ofDevice := (m.pattern.name == codeSign || driverCode.MatchString(t.string)) && ofGPU.MatchString(t.string)
	if t.ofKernel() && m.pattern.name != hardwareSign && !ofDevice {
		return // the kernel speaks of errors that are none of the job
	}
	if passedTest.MatchString(t.string) {
		return
	}
	h := &r.signs
	h.drop(r.source.Lines)
	if len(h.list) >= mostSigns { // the first and the last ones count
		h.list = slices.Delete(h.list, mostSigns/2, mostSigns/2+1)
		h.steps = slices.Delete(h.steps, mostSigns/2, mostSigns/2+1)
	}
	h.list = append(h.list, Finding{Line: Line{File: r.source.Name, Number: t.number, Text: t.shown()}, Rank: t.rank,
		Time: t.when(), Uptime: t.uptime, Fact: fact})
	h.steps = append(h.steps, h.step)
}

// passedTest is how unittest and pytest close the line of a test that is as it should be, whatever its name says.
var passedTest = lazyregexp.New(`\.\.\. (?:ok|skipped\b.*|expected failure)$|\b(?:PASSED|SKIPPED|XFAIL)\b(?: +\[ *\d+%\])?$`)

// driverCode is NVIDIA's code for memory of a GPU, or of the host for it, that could not be had.
var driverCode = lazyregexp.New(`\bNV_ERR_NO_MEMORY\b`)

// ofGPU are words of the kernel's drivers of GPUs, and of memory that is broken.
var ofGPU = lazyregexp.New(`(?i)\bnvrm\b|\bxid\b|nvidia|amdgpu|habana|\bxe\b|i915|neuron|\becc\b|machine check`)

// drop forgets signs after which the program went on.
func (h *heldSigns) drop(line int) {
	for i := len(h.list) - 1; i >= 0; i-- {
		sign, _ := h.list[i].Fact.(Sign)
		if h.step-h.steps[i] >= stepsAfter || sign.Reach > 0 && line-h.list[i].Number > sign.Reach {
			h.list, h.steps = slices.Delete(h.list, i, i+1), slices.Delete(h.steps, i, i+1)
		}
	}
}

// handled forgets the signs of an error that the program has dealt with.
func (h *heldSigns) handled(line int) {
	for len(h.list) > 0 && h.list[len(h.list)-1].Number >= line-handledDistance {
		h.list, h.steps = h.list[:len(h.list)-1], h.steps[:len(h.steps)-1]
	}
}

// handledDistance is how many lines may stand between an error and the word that it was dealt with.
const handledDistance = 10

// deviceWords and hostWords tell whose memory a line speaks of.
var (
	deviceWords = lazyregexp.New(`(?i)(?:\b|_)(?:gpu|cuda\w*|cu_?mem\w*|CUresult|hip\w*|rocm|xpu|npu|tpu|hpu|` +
		`mlu|musa|gcu|dcu|mps|metal|neuron\w*|mem_dynamic_allocator|` +
		`vulkan|kIOGPU\w*|hbm\d*|vram|device|nrt|tdrv|synapse|ascend|acl\w*|cnrt|cnnl|bfc|opencl|sycl|` +
		`level_zero|cublas\w*|` +
		`cudnn\w*|nccl|rccl|hccl|xla\w*|jaxlib|jax|cupy|rmm)(?:\b|_)|` +
		`cudaMalloc|kIOGPU|devicememory|aclrt|cnrt|musa|rtMalloc|halMem|DevMem|EL0004|cuda\d|CUDA_|metal::`)
	hostWords = lazyregexp.New(`(?i)(?:\b|_)(?:cpu|host|ram|system|heap|(?:tc|je)?malloc|calloc|realloc|mmap|java|jvm|` +
		`physical memory)(?:\b|_)|` +
		`\bjava\.lang\b|bad_alloc|defaultcpuallocator`)
	hostFirst = lazyregexp.New(`(?i)out[ _]of[ _]host|(?:\b|_)(?:host|system|cpu)[ _](?:memory|ram)\b|` +
		`\bheap (?:space|out|limit)|` +
		`java\.lang\.OutOfMemory|^memory allocation of \d+ bytes failed`)
	pinWords = lazyregexp.New(`(?i)\b(?:pinned|pin_memory|page-?locked|cu(?:da)?mem(?:host)?alloc_?host|` +
		`(?:cuda|hip)hostalloc|(?:cuda|hip)mallochost|host_?register)\b`)
)

// missingPatterns are lines in which a program says that memory is missing, in any words, and whose memory.
var missingPatterns = []pattern{
	{
		name: "memory is missing",
		literals: []string{"memory", "Memory", "MEMORY", "OOM", "lloc", "ALLOC", "RESOURCE_EXHAUSTED",
			"OutOf", "OUT_OF", "OutOfMemory"},
		expression: lackOfMemory,
		kind:       TrainerLog, picky: true,
		fact: memoryIsMissing,
	},
}

// exceptionPatterns are exceptions of C++, which end the process.
var exceptionPatterns = []pattern{
	{ // c10/cuda/CUDAException.cpp and its kin for other devices; Metal
		name: "error of a device",
		literals: []string{"CUDA error: ", "HIP error: ", "XPU error: ", "MUSA error: ", "NPU error: ",
			"Triton Error [CUDA]: ", "Triton Error [HIP]: ", "Command buffer execution failed: ", "DEVICE_LOST"},
		expression: `\b(?:(?P<by>CUDA|HIP|XPU|MUSA|NPU) error|Triton Error \[(?P<triton>CUDA|HIP)\]): ` +
			`(?P<what>(?:an? )?[a-zA-Z][\w' -]{4,80})|` +
			`(?P<metal>\[METAL\]) Command buffer execution failed: (?P<why>[A-Z][\w ]{4,80})|` +
			`\b(?P<lost>(?:[A-Z0-9]+_)+DEVICE_LOST)\b`,
		kind: TrainerLog, picky: true,
		fact: func(m *match) Fact {
			what := m.get("what") + m.get("why") + m.get("lost")
			wrong := strings.HasPrefix(what, "invalid argument")
			if t := m.stream; wrong && t != nil && t.trace != nil && t.trace.pinned {
				return LockFailed{By: "cudaHostRegister"}
			}
			if lackText.MatchString(m.whole) || supposes.MatchString(m.sentence()) || internalError.MatchString(what) {
				return nil
			}
			by := cmp.Or(strings.Trim(m.get("by")+m.get("triton")+m.get("metal"), "[]"), "device")
			return Exception{Type: by + " error", Message: what}
		},
	},
	{ // libc++abi, libstdc++, and loggers that show what an exception says
		name:       "C++ exception",
		literals:   []string{"what():", "uncaught exception of type"},
		expression: `\bwhat\(\): +(?P<what>\S.*)|uncaught exception of type (?P<type>[\w:]+): (?P<message>\S.*)`,
		kind:       TrainerLog,
		fact: func(m *match) Fact {
			message := m.get("what") + m.get("message")
			return Exception{Type: cmp.Or(m.get("type"), "an exception of C++"),
				Message: message[:min(len(message), 400)]}
		},
	},
}

// internalError are errors of devices that may hide missing memory.
var internalError = lazyregexp.New(`(?i)initialization error|unknown error|internal error|` +
	`operation not supported|not permitted`)

// ofKernel is what the kernel says of its own allocations.
var ofKernel = lazyregexp.New(`page allocation failure|\bvmalloc\b|swiotlb|kworker|slab|order:\d|\bkernel: `)

// neutral are names of code that allocates memory of the host and of devices: ONNX Runtime's arena.
var neutral = lazyregexp.New(`(?i)\b(?:onnxruntime::\S+|\S*bfc_?arena\S*)`)

// memoryIsMissing returns whose memory an error says is missing, or nil where it does not tell.
func memoryIsMissing(m *match) Fact {
	line := neutral.ReplaceAllString(m.whole, "")
	if !isError(line) || supposes.MatchString(line) || ofKernel.MatchString(line) {
		return nil
	}
	requested := Size{}
	if groups := askedFor.FindStringSubmatch(line); groups != nil {
		requested = sizeOf(cmp.Or(groups[1], groups[2]), 1)
	}
	switch {
	case requested.Beyond: // of no machine
		return HostAllocationFailed{By: "the program", Requested: requested}
	case pinWords.MatchString(line):
		return LockFailed{By: "cudaHostRegister", Requested: requested}
	case hostFirst.MatchString(line):
		return HostAllocationFailed{By: "the program", Requested: requested}
	case deviceWords.MatchString(line):
		return LibraryFailed{Library: libraryIn(line), Status: m.whole[m.indices[0]:m.indices[1]], Memory: true}
	case hostWords.MatchString(line):
		return HostAllocationFailed{By: "the program", Requested: requested}
	}
	return nil
}

// askedFor is a number of bytes that a line says was asked for.
var askedFor = lazyregexp.New(`(?i)(?:allocat\w*|alloc size|request\w*|tried to allocate|asked for|` +
	`size)[ :=]+(?:of )?(\d[\d.]*(?: ?[KMGT]i?B?| bytes)?)\b|` +
	`(\d[\d.]* ?(?:bytes|[KMGT]i?B))\b`)

// libraries are runtimes by the words of their lines.
var libraries = []struct {
	words *lazyregexp.Regexp
	name  string
}{
	{lazyregexp.New(`(?i)metal|kIOGPU|\bmps\b`), "Metal"},
	{lazyregexp.New(`(?i)\bggml`), "ggml"},
	{lazyregexp.New(`(?i)\bnrt\b|\btdrv\b|neuron`), "the Neuron runtime"},
	{lazyregexp.New(`(?i)\btpu\b|\bhbm\b|jax|xla`), "XLA"},
	{lazyregexp.New(`(?i)mindspore|ascend|\bacl|npu|rtMalloc`), "the runtime of the NPU"},
	{lazyregexp.New(`(?i)\bmlu\b|\bcnrt|\bcnnl`), "the runtime of the MLU"},
	{lazyregexp.New(`(?i)musa`), "the MUSA runtime"},
	{lazyregexp.New(`(?i)\bhpu\b|synapse|habana`), "the Gaudi runtime"},
	{lazyregexp.New(`(?i)\bxpu\b|sycl|level_zero`), "the XPU runtime"},
	{lazyregexp.New(`(?i)\bnccl\b`), "NCCL"},
	{lazyregexp.New(`(?i)\bhip|rocm|rccl`), "the ROCm runtime"},
	{lazyregexp.New(`(?i)cu_?mem|CUresult|cuda`), "the CUDA runtime"},
}

func libraryIn(line string) string {
	for i := range libraries {
		if libraries[i].words.MatchString(line) {
			return libraries[i].name
		}
	}
	return "the runtime of the device"
}
