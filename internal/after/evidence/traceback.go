package evidence

import (
	"slices"
	"strings"

	"plimsoll/internal/base/lazyregexp"
	"plimsoll/internal/base/ledger"
)

// trace is a Python traceback that is being read, or several of ranks that have no labels.
type trace struct {
	lines  int
	open   int  // how many have begun and not ended
	inside bool // the last line was a call
	pinned bool
	forked bool
	within string // Evaluation or Generation
	// ignored: its exception is one that Python has only reported
	ignored bool
	prefix  string // of a logger, in front of each line
	// headless: its first line is missing. One that has a first line takes its place.
	headless bool
	rank     int // of another process, whose traceback this one shows; else NoRank
	phase    ledger.PhaseName
	weak     bool // a call further inside may tell the phase better
	frame    text // that tells the phase
}

// tracebackHeader is what Python writes before the calls.
const tracebackHeader = "Traceback (most recent call last)"

const (
	longestTrace  = 5000 // lines
	longestPrefix = 100  // bytes
)

// frame is a call that tells the phase. A weak one tells it only if no call further inside does.
type frame struct {
	expression *lazyregexp.Regexp
	phase      ledger.PhaseName
	weak       bool
}

// frames are calls in a traceback that tell the phase of training. The outermost one counts: checkpointing calls the
// forward pass from the backward pass.
var frames = []frame{
	strong(ledger.Wake, `, in (?:wake_up|resume_memory_occupation|create_and_map)$|`+
		`\b(?:wake_up|resume_memory_occupation)\(`),
	strong(ledger.Backward, `\b(?:custom_)?backward(?:_step)?\(|autograd\.grad\(|run_backward\(|`+
		`\b(?:all)?reduce_gradients\(|finalize_model_grads|partition_gradients|, in backward_(?:pro|epi)logue$|`+
		`, in (?:[\w.]+\.)?(?:custom_)?backward(?:_step)?(?:\(|$)`),
	strong(ledger.Step, `(?:optimizer|scaler|engine|accelerator|model)\.step\(|\bopt(?:im)?\w*\.step\(|`+
		`, in (?:optimizer_step|_?take_model_step)$|optim\w*[/\\\w]*\.py", line \d+, in step$|`+
		`\b_?clip_grad_(?:norm|value)\w*\(|\.unscale_\(`),
	strong(ledger.Checkpoint, `save_(?:\w*checkpoint|pretrained|model|state|state_dict|file|16bit_model)(?:\(|$)|`+
		`\b(?:torch|dcp|dist_cp|accelerator)\.(?:async_)?save\(|_zero3_consolidated|\bpush_to_hub\(|`+
		`\b(?:get_(?:model_|optimizer_)?|full_optim_|optim_)state_dict\(|\bfull_tensor\(|`+
		`torch/distributed/checkpoint/(?:state_dict_saver\.py|filesystem\.py", line \d+, in _?write)|`+
		`torch/serialization\.py", line \d+, in _?save$|dist_checkpointing/strategies/filesystem_async\.py`),
	strong(ledger.Load, `from_pretrained\(|load_\w*(?:state_dict|checkpoint|model)\w*\(|load_(?:file|weights)\(|`+
		`torch\.load\(|safe_open\(|set_module_tensor_to_device\(|\bdispatch_model\(|_move_model_to_device\(|`+
		`prepare_model_for_kbit_training\(|`+
		`torch/serialization\.py", line \d+, in _?load$|torch/distributed/checkpoint/state_dict_loader\.py|`+
		moduleFile+`(?:to|cuda|_apply|float|half|bfloat16|to_empty)$`),
	strong(ledger.Initialize, `deepspeed\.initialize\(|accelerator\.prepare\(|`+
		`accelerate/accelerator\.py", line \d+, in _?prepare|\bfully_shard\(|`+
		`\b(?:FSDP|FullyShardedDataParallel|DDP|DistributedDataParallel)\(|setup_model_and_optimizer\(|`+
		`\binit_process_group\(|initialize_megatron\(|, in configure_optimizers$|`+
		`, in (?:_initialize_kv_caches|determine_(?:num_)?available_\w+|profile_run|capture_model)$`),
	strong(ledger.Forward, `, in (?:forward|compute_loss|_?forward_step|_?loss_step)$|\b(?:compute_loss|_loss_step)\(|`+
		moduleFile+`(?:__call__|_call_impl|_wrapped_call_impl)$`),
	weak(ledger.Initialize, `, in __init__$`),
	weak(ledger.Forward, `\b(?:cross_entropy|nll_loss|mse_loss|kl_div|log_softmax|criterion|loss_fn|loss_func?)\(|`+
		`per_token_logps|selective_log_softmax|logprobs_from_logits`),
}

func strong(phase ledger.PhaseName, expression string) frame {
	return frame{lazyregexp.New(expression), phase, false}
}

func weak(phase ledger.PhaseName, expression string) frame {
	return frame{lazyregexp.New(expression), phase, true}
}

// wholeStep is a call of a function that makes forward and backward pass and is called by an optimizer's step, as
// Lightning's closure is. What is inside tells the phase.
var wholeStep = lazyregexp.New(`\bclosure\(|, in closure$`)

// moduleFile is the beginning of a call of torch.nn.Module.
const moduleFile = `torch[/\\]nn[/\\]modules[/\\]module\.py", line \d+, in `

var (
	// exceptionText is the name of a class, with its modules and a message.
	exceptionText = lazyregexp.New(`^(?:\| +)*((?:[A-Za-z_]\w*\.)*[A-Z]\w*[a-z]\w*)(?::\s*(.*))?$`)
	// usualName is how classes of exceptions are named, for lines that may be no exception.
	usualName = lazyregexp.New(`(?:Error|Exception|Interrupt|Exit|Failure|Timeout|OutOfResources)$`)
	// notebookFrame is a call in a traceback of IPython.
	notebookFrame = lazyregexp.New(`^(?:-+> \d+ |File \S+:\d+, in |Cell In)`)
	pinnedText    = lazyregexp.New(`pin_memory|cudaHostAlloc|cudaHostRegister|pinned|bytes on host: CUDA_ERROR|` +
		`\.to\(\s*["']cpu["'],.*non_blocking ?= ?True|\.to\(.*non_blocking ?= ?True.*["']cpu["']`)
	// context is a line of IPython around a call, which was not executed.
	context = lazyregexp.New(`^ {2,}\d+ `)
	// evaluationText and generationText are calls of what trains nothing.
	evaluationText = lazyregexp.New(`, in (?:evaluate|evaluation_loop|prediction_step|validation_step|predict|_?validate)$|` +
		`\b(?:evaluate|evaluation_loop|prediction_step|validation_step|_?validate)\(`)
	generationText = lazyregexp.New(`, in (?:generate|_?sample|generate_sequences|_generate_and_score_completions)$|` +
		`\.generate(?:_sequences)?\(`)
	forkText = lazyregexp.New(`fork_exec|os\.fork\(|in _launch$|_posixsubprocess`)
)

// otherRank is what torch.distributed.checkpoint writes behind the first line of another rank's traceback
// (torch/distributed/checkpoint/api.py).
var otherRank = lazyregexp.New(`last\): \(RANK (\d{1,7})\)`)

// beginTrace begins a traceback in the stream of its first line.
func beginTrace(_ *reader, m *match) {
	if c := m.stream.trace; c == nil || c.headless || c.ignored && c.lines > 1 { // an ignored one follows at once
		m.stream.trace = &trace{rank: NoRank}
		prefix, _, _ := strings.Cut(m.text.string, tracebackHeader)
		if len(prefix) <= longestPrefix {
			m.stream.trace.prefix = prefix
			m.stream.trace.ignored = warningText.MatchString(prefix) // a logger's warning of an error that was caught
		}
	}
	m.stream.trace.open++
	if groups := otherRank.FindStringSubmatch(m.text.string); groups != nil {
		m.stream.trace.rank = atoi(groups[1])
	}
}

// warningText is how loggers label a warning.
var warningText = lazyregexp.New(`\b(?:WARNING|WARN)\b`)

// beginIgnored expects a traceback whose exception ends nothing.
func beginIgnored(_ *reader, m *match) {
	if m.stream.trace == nil {
		m.stream.trace = &trace{rank: NoRank, ignored: true}
	}
}

// trace reads a line of a traceback. Found says that the line has facts of its own, which come after those before it.
func (r *reader) trace(s *stream, t *text, found bool, before int) {
	c := s.trace
	if c == nil || strings.Contains(t.string, tracebackHeader) {
		return
	}
	c.lines++
	if rest, ok := strings.CutPrefix(t.string, c.prefix); ok {
		t.string = rest
	}
	if found && exceptionText.MatchString(strings.TrimSpace(t.string)) {
		t.string = strings.TrimSpace(t.string) // torchrun indents an error that it has recorded
	}
	switch {
	case c.lines > longestTrace:
		s.trace = nil
	case strings.HasPrefix(t.string, " "), strings.HasPrefix(t.string, "\t"), t.string == "",
		strings.HasPrefix(t.string, "│"), strings.HasPrefix(t.string, "╰"), // a box of Rich
		notebookFrame.MatchString(t.string):
		c.see(t, r.callOf(t.string))
	default:
		groups := exceptionText.FindStringSubmatch(t.string)
		if groups == nil || (!c.inside || c.headless) && !usualName.MatchString(groups[1]) {
			if c.headless { // calls that a program has printed, and no error
				s.trace = nil
			}
			return // a line of another process, or of a message
		}
		if c.phase != "" {
			after := slices.Clone(r.source.Findings[before:])
			r.source.Findings = r.source.Findings[:before]
			r.add(&c.frame, Progress{Phase: c.phase, Step: -1})
			r.source.Findings = append(r.source.Findings, after...)
		}
		if c.rank != NoRank {
			t.rank = c.rank
		}
		exception := Exception{Type: groups[1], Message: groups[2]}
		switch w := s.wrapped; {
		case c.ignored:
		case !found:
			r.kinds[TrainerLog]++
			known := len(r.source.Findings)
			r.add(t, exception)
			goesOn := exception.Message == "" || strings.HasSuffix(exception.Message, ":")
			if goesOn && len(r.source.Findings) > known {
				s.headline = len(r.source.Findings)
			}
		case w != nil && w.first.number == t.number:
			w.first, w.exception = *t, exception
		}
		if c.rank != NoRank {
			for i := before; i < len(r.source.Findings); i++ {
				r.source.Findings[i].Rank = c.rank
			}
		}
		c.inside, c.phase = false, ""
		if strings.Contains(t.string, " ray::") {
			c.open++ // Ray goes on with the traceback of the actor
		}
		if c.open--; c.open <= 0 {
			s.trace = nil
		}
	}
}

// complete adds the first line that follows an exception to its text, if the exception's own line says no more:
// "Error(s) in loading state_dict for Llama:" goes on with the first of them.
func (r *reader) complete(s *stream, t *text) {
	if s.headline == 0 {
		return
	}
	if text := t.shown(); text != "" && strings.IndexByte(" \t", t.string[0]) >= 0 {
		r.source.Findings[s.headline-1].Text += " " + text
		r.held += len(text)
	}
	s.headline = 0
}

// yields reports whether a call further inside tells the phase better than what was seen.
func (c *trace) yields(f *frame) bool {
	inside := c.phase == ledger.Backward && f.phase == ledger.Step // as accelerate's backward() of DeepSpeed steps
	return c.phase == "" || c.weak && !f.weak || inside
}

// call is what a line with a call tells by itself.
type call struct {
	pinned, forked, wholeStep bool
	within                    string
	frames                    []*frame // that it matches
}

// callOf returns what a line tells. Tracebacks repeat their calls.
func (r *reader) callOf(line string) *call {
	w := wordingOf(line)
	if known := r.calls[w]; known != nil {
		return known
	}
	c := &call{
		pinned: pinnedText.MatchString(line) && !context.MatchString(line), forked: forkText.MatchString(line),
		wholeStep: wholeStep.MatchString(line),
	}
	switch {
	case generationText.MatchString(line):
		c.within = Generation
	case evaluationText.MatchString(line):
		c.within = Evaluation
	}
	for i := range frames {
		if f := &frames[i]; f.expression.MatchString(line) {
			c.frames = append(c.frames, f)
		}
	}
	if len(r.calls) < mostWordings {
		r.calls[w] = c
	}
	return c
}

// see takes what a line with a call tells.
func (c *trace) see(t *text, line *call) {
	c.inside = true
	c.pinned, c.forked = c.pinned || line.pinned, c.forked || line.forked
	if line.within != "" && c.within != Generation {
		c.within = line.within
	}
	if line.wholeStep {
		c.phase = ""
	}
	for _, f := range line.frames {
		if c.yields(f) {
			c.phase, c.weak, c.frame = f.phase, f.weak, *t
			c.frame.string = t.shown()
			return
		}
	}
}

// threadDump is what Python's faulthandler writes of a SIGBUS: the stack of each thread, the most recent call first.
type threadDump struct {
	at      text
	current bool // the lines are of the thread that got the signal
	calls   int  // of that thread
	reads   string
}

// innermost is how many calls of a stack tell what a thread was doing.
const innermost = 6

var (
	threadLine = lazyregexp.New(`^(?:(Current )?[Tt]hread 0x|Stack \(most recent call first|Extension modules|$)`)
	dumpedCall = lazyregexp.New(`^\s+File "([^"]+)", line \d+,? in (\S+)`)
	// readsFile are calls that read files through mapped pages: of weights, arrays and tables.
	readsFile = lazyregexp.New(`safetensors|memmap|\bmmap\b|weight_loader|load_weights|load_state_dict|load_file|` +
		`safe_open|torch/serialization\.py|pyarrow|datasets/(?:table|arrow_dataset|formatting)|indexed_dataset|\blmdb\b`)
)

func (d *threadDump) line(_ *reader, t *text) bool {
	if groups := threadLine.FindStringSubmatch(t.string); groups != nil {
		d.current = groups[1] != "" || t.string == "" && d.current
		return true
	}
	call := dumpedCall.FindStringSubmatch(t.string)
	if call == nil {
		return false
	}
	if d.current && d.reads == "" && d.calls < innermost && readsFile.MatchString(call[0]) {
		d.reads = call[2]
	}
	if d.current {
		d.calls++
	}
	return true
}

func (d *threadDump) end(r *reader) { r.add(&d.at, BusError{Reads: d.reads}) }
