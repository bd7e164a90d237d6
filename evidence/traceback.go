package evidence

import (
	"regexp"
	"slices"
	"strings"

	"plimsoll/ledger"
)

// trace is a Python traceback that is being read, or several of ranks that have no labels.
type trace struct {
	lines  int
	open   int  // how many have begun and not ended
	inside bool // the last line was a call
	pinned bool
	forked bool
	// ignored: its exception is one that Python has only reported
	ignored bool
	phase   ledger.PhaseName
	frame   text // that tells the phase
}

// longestTrace is in lines.
const longestTrace = 5000

// frames are calls in a traceback that tell the phase of training. The outermost one counts: checkpointing calls the
// forward pass from the backward pass.
var frames = []struct {
	expression *regexp.Regexp
	phase      ledger.PhaseName
}{
	{regexp.MustCompile(`\b(?:custom_)?backward(?:_step)?\(|autograd\.grad\(|run_backward\(|` +
		`, in (?:[\w.]+\.)?(?:custom_)?backward(?:_step)?(?:\(|$)`), ledger.Backward},
	{regexp.MustCompile(`(?:optimizer|optim|opt|engine|scaler|accelerator|model)\.step\(|, in optimizer_step$`), ledger.Step},
	{regexp.MustCompile(`\.?(?:save_checkpoint|_save_checkpoint|save_pretrained|save_model|save_state|torch\.save|save_file)\(|` +
		`get_(?:model_|optimizer_)?state_dict\(|` +
		`torch/serialization\.py", line \d+, in _?save$|dist_checkpointing/strategies/filesystem_async\.py`),
		ledger.Checkpoint},
	{regexp.MustCompile(`from_pretrained\(|load_state_dict\(|load_checkpoint\(|load_file\(|torch\.load\(|` +
		`safe_open\(|torch/serialization\.py", line \d+, in _?load$|` + moduleFile + `(?:to|cuda|_apply)$`), ledger.Load},
	{regexp.MustCompile(`deepspeed\.initialize\(|accelerator\.prepare\(|fully_shard\(|FullyShardedDataParallel\(|` +
		`DistributedDataParallel\(|setup_model_and_optimizer\(|, in __init__$`), ledger.Initialize},
	{regexp.MustCompile(`, in (?:forward|compute_loss|_?forward_step|_?loss_step)$|\b(?:compute_loss|_loss_step)\(|` +
		moduleFile + `(?:__call__|_call_impl|_wrapped_call_impl)$`), ledger.Forward},
}

// moduleFile is the beginning of a call of torch.nn.Module.
const moduleFile = `torch[/\\]nn[/\\]modules[/\\]module\.py", line \d+, in `

var (
	// exceptionText is the name of a class, with its modules and a message.
	exceptionText = regexp.MustCompile(`^(?:\| +)*((?:[A-Za-z_]\w*\.)*[A-Z]\w*[a-z]\w*)(?::\s*(.*))?$`)
	// usualName is how classes of exceptions are named, for lines that may be no exception.
	usualName = regexp.MustCompile(`(?:Error|Exception|Interrupt|Exit|Failure|Timeout|OutOfResources)$`)
	// notebookFrame is a call in a traceback of IPython.
	notebookFrame = regexp.MustCompile(`^(?:-+> \d+ |File \S+:\d+, in |Cell In)`)
	pinnedText    = regexp.MustCompile(`pin_memory|cudaHostAlloc|cudaHostRegister|pinned|bytes on host: CUDA_ERROR`)
	forkText      = regexp.MustCompile(`fork_exec|os\.fork\(|in _launch$|_posixsubprocess`)
)

// beginTrace begins a traceback in the stream of its first line.
func beginTrace(_ *reader, m *match) {
	if c := m.stream.trace; c == nil || c.ignored && c.lines > 1 { // an ignored one follows at once
		m.stream.trace = &trace{}
	}
	m.stream.trace.open++
}

// beginIgnored expects a traceback whose exception ends nothing.
func beginIgnored(_ *reader, m *match) {
	if m.stream.trace == nil {
		m.stream.trace = &trace{ignored: true}
	}
}

// trace reads a line of a traceback. Found says that the line has facts of its own, which come after those before it.
func (r *reader) trace(s *stream, t *text, found bool, before int) {
	c := s.trace
	if c == nil || strings.Contains(t.string, "Traceback (most recent call last)") {
		return
	}
	c.lines++
	if found && exceptionText.MatchString(strings.TrimSpace(t.string)) {
		t.string = strings.TrimSpace(t.string) // torchrun indents an error that it has recorded
	}
	switch {
	case c.lines > longestTrace:
		s.trace = nil
	case strings.HasPrefix(t.string, " "), strings.HasPrefix(t.string, "\t"), t.string == "",
		strings.HasPrefix(t.string, "│"), // a box of Rich
		notebookFrame.MatchString(t.string):
		c.see(t)
	default:
		groups := exceptionText.FindStringSubmatch(t.string)
		if groups == nil || !c.inside && !usualName.MatchString(groups[1]) {
			return // a line of another process, or of a message
		}
		if c.phase != "" {
			after := slices.Clone(r.source.Findings[before:])
			r.source.Findings = r.source.Findings[:before]
			r.add(&c.frame, Progress{Phase: c.phase, Step: -1})
			r.source.Findings = append(r.source.Findings, after...)
		}
		exception := Exception{Type: groups[1], Message: groups[2]}
		switch w := s.wrapped; {
		case c.ignored:
		case !found:
			r.kinds[TrainerLog]++
			r.add(t, exception)
		case w != nil && w.begun == t.number:
			w.exception = t.finding(r.source.Name, exception)
		}
		c.inside, c.phase = false, ""
		if c.open--; c.open <= 0 {
			s.trace = nil
		}
	}
}

// see takes what a line with a call tells.
func (c *trace) see(t *text) {
	c.inside = true
	c.pinned = c.pinned || pinnedText.MatchString(t.string)
	c.forked = c.forked || forkText.MatchString(t.string)
	if c.phase != "" {
		return
	}
	for i := range frames {
		if f := &frames[i]; f.expression.MatchString(t.string) {
			c.phase, c.frame = f.phase, *t
			c.frame.string = t.shown()
			return
		}
	}
}
