// Package launcher reads how a command starts the ranks of a training: wrappers such as srun and docker run, launchers
// such as torchrun, and the program that they start.
package launcher

import (
	"path"
	"slices"
	"strconv"
	"strings"

	"plimsoll/internal/base/lazyregexp"
	"plimsoll/internal/base/ledger"
	"plimsoll/internal/input/shell"
)

// Line is a command that starts a program on ranks.
type Line struct {
	// Program is the program with its arguments. The first word is a command, the path of a script, or a module: those
	// of python -m are written as paths.
	Program []shell.Word
	Module  bool // the first word is the path of a module
	Command *shell.Command
	By      string // the launcher that starts the ranks, "" for none
	At      int64  // of the launcher

	PerNode, Nodes *Count // nil where the line does not say them
	Total          *Count // ranks of all nodes, where only these are said
	Unknown        []Count
	// EveryDevice says that the launcher starts a rank on each device that it sees where the line names no number.
	EveryDevice bool
	HostMemory  *Memory
	// Options are those of launchers, by their names with underscores. The last one counts.
	Options map[string]shell.Word

	own []setting // of env and docker run -e
	in  Allocation
}

// Count is a number that a line says.
type Count struct {
	At   int64
	Name string // of the flag or variable
	Is   int
}

// Memory is memory of a host.
type Memory struct {
	At   int64
	Name string
	Is   ledger.Bytes
}

type setting struct {
	name  string
	value shell.Word
}

// Read reads a command in an allocation. It returns nil for one that starts no program that a launcher or Python runs.
func Read(c *shell.Command, in Allocation) *Line {
	l := &Line{Command: c, Options: map[string]shell.Word{}, in: in, HostMemory: in.Memory}
	words := c.Words
	for more := true; more && len(words) > 0; {
		words, more = l.unwrap(words)
	}
	if l.Program = words; len(words) == 0 {
		return nil
	}
	if l.By == "" && in.Spawns && in.Nodes != nil && in.Nodes.Is > 1 {
		l.By, l.Nodes, l.PerNode = "PyTorchJob", in.Nodes, &Count{in.Nodes.At, "a rank in each pod", 1}
	}
	l.finish()
	return l
}

// unwrap takes a wrapper or a launcher off the words. It is false where the program is reached.
func (l *Line) unwrap(words []shell.Word) ([]shell.Word, bool) {
	first := words[0]
	if hidden(first) && l.isOuter() && starts(words[1:]) {
		if strings.Contains(strings.ToLower(first.Text), "python") {
			return words[1:], true
		}
		l.starts(first.Text, first.At)
		l.EveryDevice = true
		words = words[1:]
		if at := slices.IndexFunc(words, isScript); strings.HasPrefix(words[0].Text, "-") && at > 0 {
			words = words[at:]
		}
		return words, true
	}
	if name, value, is := assignment(first); is {
		l.own = append(l.own, setting{name, value})
		return words[1:], true
	}
	t, n := toolOf(words)
	if t == nil {
		return words, false
	}
	o := t.options(words[n:])
	rest := o.rest[min(t.skips, len(o.rest)):]
	if t.read != nil {
		t.read(l, first, o)
	}
	name, isModule := o.given[moduleFlag]
	isModule = isModule && t.modules
	switch {
	case isModule && launcherModules[name.Text] != "":
		name.Text = launcherModules[name.Text]
		return slices.Concat([]shell.Word{name}, rest[1:]), true
	case isModule, l.Options[moduleOption].Text != "" && t.read != nil:
		l.Module = len(rest) > 0 && !strings.Contains(rest[0].Text, "$")
		return module(rest), false
	case t.keeps:
		return slices.Concat(words[:n], rest), false
	}
	_, isCode := o.given["c"]
	if t == &python && isCode {
		return nil, false
	}
	return rest, true
}

// isOuter reports whether the ranks are still those of no launcher, or of one that may start another.
func (l *Line) isOuter() bool { return l.By == "" || l.By == "srun" || strings.HasPrefix(l.By, "mpi") }

// hidden reports whether a word is all of an unknown text, such as $LAUNCHER.
func hidden(w shell.Word) bool {
	return strings.HasPrefix(w.Text, "$") && !strings.ContainsAny(w.Text, "/ ")
}

func isScript(w shell.Word) bool { return strings.HasSuffix(w.Text, ".py") }

// starts reports whether words have a program behind flags.
func starts(words []shell.Word) bool {
	return slices.ContainsFunc(words, func(w shell.Word) bool {
		t, _ := toolOf([]shell.Word{w})
		return isScript(w) || t != nil || w.Text == "-m"
	})
}

var variableName = lazyregexp.New(`^\w+$`)

// assignment returns the parts of NAME=value.
func assignment(w shell.Word) (string, shell.Word, bool) {
	name, value, is := strings.Cut(w.Text, "=")
	if !is || !variableName.MatchString(name) {
		return "", w, false
	}
	return name, shell.Word{Text: value, At: w.At, Quoted: w.Quoted, Unknown: w.Unknown}, true
}

// module returns the words of a module with its path in place of its name.
func module(words []shell.Word) []shell.Word {
	if len(words) == 0 {
		return nil
	}
	first := words[0]
	if strings.Contains(first.Text, "$") {
		return words
	}
	first.Text = strings.ReplaceAll(first.Text, ".", "/") + ".py"
	return slices.Concat([]shell.Word{first}, words[1:])
}

// options are the flags behind a tool.
type options struct {
	given map[string]shell.Word // by name, with underscores and without dashes: the last of each
	list  []setting             // all of them
	rest  []shell.Word          // behind them
	// hidden is a word among them whose value the script does not say, and which may have flags.
	hidden *shell.Word
}

// first returns the value of the first of these flags that is given.
func (o options) first(names ...string) (shell.Word, string, bool) {
	for _, name := range names {
		if w, is := o.given[name]; is {
			return w, name, true
		}
	}
	return shell.Word{}, "", false
}

// options reads the flags of a tool up to the first word that is none.
func (t *tool) options(words []shell.Word) options {
	o := options{given: map[string]shell.Word{}}
	for len(words) > 0 {
		w := words[0]
		if w.Text == "--" {
			words = words[1:]
			break
		}
		if hidden(w) && t.read != nil && starts(words[1:]) {
			o.hidden, words = &w, words[1:]
			continue
		}
		if !strings.HasPrefix(w.Text, "-") || w.Text == "-" {
			break
		}
		flag, n := t.flag(words)
		o.given[flag.name] = flag.value
		o.list = append(o.list, flag)
		words = words[n:]
		if flag.name == moduleOption && t.modules {
			flag.name, o.given[moduleFlag] = moduleFlag, flag.value
		}
		if t.modules && flag.name == moduleFlag { // the module's own flags follow
			words = slices.Concat([]shell.Word{flag.value}, words)
			break
		}
	}
	o.rest = words
	return o
}

// flag reads the flag that words start with, and returns how many words it has.
func (t *tool) flag(words []shell.Word) (setting, int) {
	w := words[0]
	name, value, given := strings.Cut(strings.TrimLeft(w.Text, "-"), "=")
	name = strings.ReplaceAll(name, "-", "_")
	switch isShort := len(w.Text) > 2 && w.Text[1] != '-'; {
	case given:
		return setting{name, shell.Word{Text: value, At: w.At, Quoted: w.Quoted, Unknown: w.Unknown}}, 1
	case t.stands(name):
		return setting{name, shell.Word{Text: "true", At: w.At}}, 1
	case isShort && t.attached && strings.Trim(name[1:], "0123456789") == "":
		return setting{name[:1], shell.Word{Text: name[1:], At: w.At}}, 1
	case len(words) == 1:
		return setting{name, shell.Word{At: w.At}}, 1
	}
	behind := words[1]
	behind.At = w.At
	return setting{name, behind}, min(len(words), 2+t.more[name])
}

// stands reports whether a flag has no value.
func (t *tool) stands(name string) bool {
	if t.valued != "" {
		return !slices.Contains(strings.Fields(t.valued), name)
	}
	return slices.Contains(strings.Fields(t.alone), name)
}

// Variable returns a variable that the program sees, the offset of its name, and whether it is set.
func (l *Line) Variable(name string) (shell.Word, int64, bool) {
	for _, s := range slices.Backward(l.own) {
		if s.name == name {
			return s.value, s.value.At, true
		}
	}
	value, at, exported, set := l.Command.Variable(name)
	return value, at, set && exported
}

// Hidden returns the offset of a variable that the script sets and does not export, and whether it is one.
func (l *Line) Hidden(name string) (int64, bool) {
	_, _, seen := l.Variable(name)
	_, at, exported, set := l.Command.Variable(name)
	return at, set && !exported && !seen
}

// count reads a number of ranks or nodes. A value that the script does not say is unknown.
func (l *Line) count(name string, w shell.Word) *Count {
	c := Count{At: w.At, Name: name}
	n, err := strconv.Atoi(w.Text)
	if err != nil || n < 1 {
		l.Unknown = append(l.Unknown, c)
		return nil
	}
	c.Is = n
	return &c
}

// variable reads a number from a variable of the environment.
func (l *Line) variable(name string) *Count {
	value, at, set := l.Variable(name)
	if !set {
		return nil
	}
	value.At = at
	return l.count(name, value)
}

// Variables reads the ranks of a node and the nodes from variables that a program reads. They do not count where a
// launcher starts the ranks.
func (l *Line) Variables(perNode, nodes string) {
	if !l.isOuter() {
		return
	}
	_, _, says := l.Variable(perNode)
	if _, _, also := l.Variable(nodes); l.By != "" && (says || also) {
		l.starts("", 0)
	} else if l.By != "" {
		return
	}
	l.PerNode, l.Nodes = l.variable(perNode), l.variable(nodes)
	if l.PerNode != nil || l.Nodes != nil || len(l.Unknown) > 0 {
		l.By = perNode
	}
}

// OnEveryDevice has a program start a rank on each device that it sees.
func (l *Line) OnEveryDevice(by string) {
	if l.PerNode == nil && l.Total == nil {
		l.By, l.EveryDevice = by, true
		l.At = l.Program[0].At
		l.finish()
	}
}

// Pass reads flags of accelerate launch among the arguments of a program that passes them on.
func (l *Line) Pass(arguments []shell.Word) {
	for i, w := range arguments {
		if !strings.HasPrefix(w.Text, "--") {
			continue
		}
		flag, _ := (&tool{}).flag(arguments[i:])
		switch flag.name {
		case "num_processes", "num_machines", "config_file", "accelerate_config":
			l.Options[strings.Replace(flag.name, "accelerate_config", "config_file", 1)] = flag.value
			l.By, l.At = "accelerate", w.At
		}
	}
	if l.By == "" {
		return
	}
	o := options{given: l.Options}
	l.EveryDevice = true
	l.Nodes, l.Total = l.said(o, "", "num_machines"), l.said(o, "", "num_processes")
	l.finish()
}

// visible are the variables that say which devices a process sees.
var visible = []string{"CUDA_VISIBLE_DEVICES", "HIP_VISIBLE_DEVICES", "ROCR_VISIBLE_DEVICES",
	"ASCEND_RT_VISIBLE_DEVICES", "ZE_AFFINITY_MASK", "MUSA_VISIBLE_DEVICES"}

// devices returns the number of devices that the environment makes visible, nil where it does not say them.
func (l *Line) devices() *Count {
	for _, name := range visible {
		value, at, set := l.Variable(name)
		if !set {
			continue
		}
		if value.Text == "" || len(value.Unknown) > 0 {
			return nil
		}
		return &Count{at, name, len(strings.Split(strings.Trim(value.Text, ","), ","))}
	}
	return l.in.GPUs
}

// finish sets the ranks of a node that follow from devices, and divides those of all nodes.
func (l *Line) finish() {
	if l.EveryDevice && l.PerNode == nil && l.Total == nil {
		l.PerNode = l.devices()
	}
	if l.Total == nil || l.PerNode != nil {
		return
	}
	nodes := 1
	if l.Nodes != nil {
		nodes = l.Nodes.Is
	}
	if l.Total.Is >= nodes {
		l.PerNode = &Count{l.Total.At, l.Total.Name, l.Total.Is / nodes}
	}
}

// toolOf returns the tool that the first words name, and how many words that takes.
func toolOf(words []shell.Word) (*tool, int) {
	base := path.Base(words[0].Text)
	for i := range tools {
		names := strings.Fields(tools[i].name)
		if !slices.Contains(strings.Split(names[0], "|"), base) || len(words) < len(names) {
			continue
		}
		same := true
		for j, name := range names[1:] {
			same = same && slices.Contains(strings.Split(name, "|"), words[j+1].Text)
		}
		if same {
			return &tools[i], len(names)
		}
	}
	if isPython(base) {
		return &python, 1
	}
	return nil, 0
}

// isPython reports whether a command is Python: python3.11, for one.
func isPython(base string) bool {
	version, is := strings.CutPrefix(base, "python")
	return is && strings.Trim(version, "0123456789.") == ""
}
