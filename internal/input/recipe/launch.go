package recipe

import (
	"cmp"
	"errors"
	"fmt"
	"io/fs"
	"maps"
	"slices"
	"strconv"
	"strings"

	"plimsoll/internal/base/fault"
	"plimsoll/internal/base/files"
	"plimsoll/internal/base/lazyregexp"
	"plimsoll/internal/base/ledger"
	"plimsoll/internal/input/launcher"
	"plimsoll/internal/input/python"
	"plimsoll/internal/input/recipe/strict"
	"plimsoll/internal/input/shell"
)

// Launch is what a script says of the ranks of its training.
type Launch struct {
	By             string // the launcher, or the variable that a program reads; "" for none
	Place          fault.Position
	PerNode, Nodes *Count // nil where the script does not say them
	// Unknown are arguments and variables whose values the script does not set.
	Unknown []Count
	// EveryDevice says that a rank starts on each device that is visible, and the script does not say how many are.
	// Several says that the script asks for a launcher of several ranks by its name.
	EveryDevice, Several bool
	HostMemory           ledger.Bytes // of a node, 0 where the script does not say it
	MemoryPlace          fault.Position
	MemoryName           string
	// Environment are the variables that change what the training holds.
	Environment []Variable
	Notes       []Note
}

// Count is a number in a script.
type Count struct {
	Place fault.Position
	Name  string // of the argument or variable
	Is    int
}

// Started is what a script starts.
type Started struct {
	File   string // of the script
	Launch *Launch
	// Config is the file that says how the training is, "" where the arguments of the command say it.
	Config string
	// Accelerate is the configuration of accelerate: its file, and what its flags change. It is nil without.
	Accelerate *strict.Document
	// Command are the words behind Config, where that is a source of Python.
	Command []python.Argument
	// Texts are those of files that the script writes itself, and of Config where arguments go before its keys.
	Texts files.Texts
}

// Starts returns what the script at path starts, or nil for a file that is no script of a training that plimsoll reads.
// With an accelerate configuration given, that of the script does not count.
func Starts(path string, texts files.Texts, given bool) (*Started, error) {
	text, err := texts.Read(path, largest)
	if err != nil || !isScript(path, text) {
		return nil, nil
	}
	script, in, err := readScript(path, text)
	if err != nil {
		return nil, nil // Detect says so
	}
	found := trainings(script, in)
	if len(found) == 0 {
		found = sourcesOf(path, script, in, texts)
	}
	if len(found) != 1 || found[0].kind.Flag != ConfigFlag {
		return nil, nil
	}
	s := &starter{training: found[0], script: script, to: &Started{File: path, Texts: files.Texts{}},
		document: &strict.Document{File: path, Text: text, Root: &strict.Value{Kind: '{'}}}
	maps.Copy(s.to.Texts, texts)
	for name, written := range script.Written {
		s.to.Texts[name] = []byte(written)
	}
	return s.to, s.read(given)
}

// starter reads what a script starts.
type starter struct {
	training
	script   *shell.Script
	document *strict.Document // of the script, for places
	to       *Started
}

func (s *starter) read(given bool) error {
	if s.kind == sourceKind {
		s.source()
	} else if err := s.configuration(); err != nil {
		return err
	}
	if s.kind.ByAccelerate && s.line.By == "" { // its command passes these on
		s.line.Pass(s.arguments)
	}
	if v := launchVariables(s.kind); v != nil {
		s.line.Variables(v[0], v[1])
	}
	s.ray()
	s.everyDevice()
	s.hostfile()
	if err := s.spreads(); err != nil {
		return err
	}
	if !given {
		if err := s.accelerate(); err != nil {
			return err
		}
	}
	s.to.Launch = launchOf(s.document, s.line)
	s.to.Launch.Environment = environmentOf(s.document, s.line)
	s.to.Launch.Several = s.to.Launch.Several || s.forced() || s.line.Nodes != nil && s.line.Nodes.Is > 1
	unset, err := unsetNotes(s.document, s.script, s.unset)
	if err != nil {
		return err
	}
	s.to.Launch.Notes = append(s.to.Launch.Notes, unset...)
	s.notes()
	return nil
}

// ray reads the ranks that Ray starts where a variable asks for it: those of a key of the file or of the command, or 1.
func (s *starter) ray() {
	if s.kind.Program == nil || !s.isOn(s.kind.Program.Ray[0]) {
		return
	}
	variable, key := s.kind.Program.Ray[0], s.kind.Program.Ray[1]
	_, at, _ := s.line.Variable(variable)
	s.line.PerNode, s.line.EveryDevice = &launcher.Count{At: at, Name: variable, Is: 1}, false
	for _, root := range []*strict.Value{s.keys(), {Kind: '{', Members: commandMembers(s.arguments)}} {
		if m := root.Member(key); m != nil {
			if n, err := strconv.Atoi(m.Value.Text); err == nil && n > 0 {
				s.line.PerNode.Is, s.line.PerNode.Name = n, variable+" with "+key
			}
		}
	}
}

// keys returns the keys of the file that the script names, none without one.
func (s *starter) keys() *strict.Value {
	text, err := s.to.Texts.Read(s.to.Config, largest)
	if s.to.Config == "" || err != nil {
		return &strict.Value{Kind: '{'}
	}
	d := parseAny(s.to.Config, text)
	if d == nil {
		return &strict.Value{Kind: '{'}
	}
	return d.Root
}

// everyDevice has a command of the kind that starts ranks itself do so.
func (s *starter) everyDevice() {
	v := launchVariables(s.kind)
	ownRanks := s.line.By == "" || v != nil && s.line.By == v[0]
	if s.kind.EveryDevice && ownRanks && (strings.Contains(s.command, " ") || s.forced()) {
		s.line.OnEveryDevice(s.command)
	}
}

// spreads refuses a program that has the model on several devices of a rank: by device_map, or by DataParallel, as
// transformers' Trainer has one process do that sees several GPUs.
func (s *starter) spreads() error {
	const name = "CUDA_VISIBLE_DEVICES"
	w, at, set := s.line.Variable(name)
	visible, ranks := len(strings.Split(w.Text, ",")), 1
	if s.line.PerNode != nil {
		ranks = max(1, s.line.PerNode.Is)
	}
	if !set || strings.Contains(w.Text, "$") || visible/ranks < 2 {
		return nil
	}
	_, engine := s.line.Options["deepspeed"]
	engine = engine || slices.ContainsFunc(s.arguments, func(w shell.Word) bool {
		return strings.HasPrefix(w.Text, "--deepspeed")
	})
	if isAlone := s.line.By == "" && s.line.PerNode == nil && !s.line.EveryDevice; isAlone && !engine &&
		!s.kind.Spreads && s.kind.Program != nil && s.kind.Program.Hosts {
		return s.fault(at, fmt.Sprintf("%s shows %d GPUs, and one process starts: transformers' Trainer then divides "+
			"each batch among the GPUs by DataParallel, which is not planned", name, visible),
			fmt.Sprintf("start a rank on each GPU by torchrun --nproc_per_node %d or accelerate launch, or show one "+
				"GPU", visible))
	}
	if !s.kind.Spreads {
		return nil
	}
	return s.fault(at, fmt.Sprintf("%s shows %d GPUs, and %s: %s then spreads the model over the GPUs of "+
		"a rank (device_map), which is not planned yet", name, visible, started(ranks), s.kind.Program.Name),
		fmt.Sprintf("set %s to %d for a rank on each GPU", s.kind.LaunchVariables[0], visible))
}

// started says how many ranks start.
func started(ranks int) string {
	if ranks == 1 {
		return "1 rank starts"
	}
	return fmt.Sprintf("%d ranks start", ranks)
}

// hostfile reads the hosts of deepspeed --hostfile, if the file is here and all have as many slots.
func (s *starter) hostfile() {
	l := s.line
	name, is := l.Options["hostfile"]
	if short, also := l.Options["H"]; also {
		name, is = short, true
	}
	if l.By != "deepspeed" || !is || l.Nodes != nil {
		return
	}
	_, text, err := s.find(name)
	if err != nil {
		return
	}
	hosts, slots := 0, 0
	for line := range strings.Lines(string(text)) {
		found := hostLine.FindStringSubmatch(line)
		if found == nil {
			continue
		}
		n, err := strconv.Atoi(found[1])
		if err != nil || n < 1 || hosts > 0 && n != slots {
			return
		}
		hosts, slots = hosts+1, n
	}
	if hosts == 0 {
		return
	}
	l.Nodes = &launcher.Count{At: name.At, Name: "hostfile", Is: hosts}
	if l.PerNode == nil {
		l.PerNode = &launcher.Count{At: name.At, Name: "hostfile", Is: slots}
	}
}

// hostLine matches a host of a hostfile.
var hostLine = lazyregexp.New(`^[^\s#]+\s+slots=(\d+)`)

// forced reports whether a variable has the command start ranks by a launcher.
func (s *starter) forced() bool {
	return s.isOn(s.kind.Forced)
}

// isOn reports whether a variable of the environment is set to what programs take for true.
func (s *starter) isOn(variable string) bool {
	value, _, set := s.line.Variable(variable)
	isTrue := slices.Contains([]string{"1", "true", "yes", "y", "on"}, strings.ToLower(value.Text))
	return variable != "" && set && isTrue
}

// launchOf returns what a line says of ranks, with places.
func launchOf(d *strict.Document, line *launcher.Line) *Launch {
	placed := func(c *launcher.Count) *Count {
		if c == nil {
			return nil
		}
		return &Count{d.Position(c.At), c.Name, c.Is}
	}
	l := &Launch{By: line.By, Place: d.Position(line.At), PerNode: placed(line.PerNode), Nodes: placed(line.Nodes),
		EveryDevice: line.EveryDevice && line.PerNode == nil}
	l.Several = line.By != "" && !strings.Contains(line.By, " ") || line.By == "accelerate launch"
	for _, u := range line.Unknown {
		l.Unknown = append(l.Unknown, *placed(&u))
	}
	if m := line.HostMemory; m != nil {
		l.HostMemory, l.MemoryPlace, l.MemoryName = m.Is, d.Position(m.At), m.Name
	}
	return l
}

// notes says what of the script only a run can tell.
func (s *starter) notes() {
	l := s.to.Launch
	note := func(at int64, key, says string) {
		l.Notes = append(l.Notes, Note{Where: s.document.Position(at), What: key + " " + says})
	}
	l.Notes = append(l.Notes, sourcedNotes(s.document, s.script)...)
	l.Notes = append(l.Notes, turnNotes(s.document, s.line, s.command)...)
	for _, name := range s.kind.LaunchVariables {
		if at, hidden := s.line.Hidden(name); hidden {
			note(at, name, "is set and not exported, so the program does not see it: write export before it")
		}
	}
	s.misspelt(note)
}

// turnNotes says what decides whether a script runs a command, and how often.
func turnNotes(d *strict.Document, line *launcher.Line, command string) []Note {
	says := ""
	switch c := line.Command; {
	case c.Unsure != "":
		says = "runs only as " + c.Unsure + " allows, which plimsoll does not evaluate"
	case c.Often > 1:
		says = fmt.Sprintf("runs %d times in a loop: the plan is of the first", c.Often)
	default:
		return nil
	}
	return []Note{{Where: d.Position(line.Program[0].At), What: command + " " + says}}
}

// misspelt notes variables that the program does not read, and that are a letter or two from one that it reads.
func (s *starter) misspelt(note func(at int64, key, says string)) {
	read := append(strings.Fields("CUDA_VISIBLE_DEVICES PYTORCH_CUDA_ALLOC_CONF"), s.kind.LaunchVariables...)
	for way := range strings.FieldsSeq(s.kind.ConfigIn) {
		if name, is := strings.CutPrefix(way, "$"); is {
			read = append(read, name)
		}
	}
	for _, name := range s.line.Command.Environment() {
		for _, meant := range read {
			_, _, set := s.line.Variable(meant)
			if _, at, _ := s.line.Variable(name); !set && fault.Misspells(name, meant, 2) {
				note(at, name, "is set, and no program reads it: did you mean "+meant+"?")
			}
		}
	}
}

// configuration finds the file that a command names, and puts its other arguments over the file's keys.
func (s *starter) configuration() error {
	name, rest := s.named()
	if name == nil {
		if s.kind.OnlyByFile {
			what := fmt.Sprintf("%s names no file with the configuration", s.command)
			if s.kind.Unnamed != "" {
				return s.fault(s.line.Program[0].At, what+": "+s.kind.Unnamed, asItRuns(s.line))
			}
			return s.fault(s.line.Program[0].At, what, "give the file to plimsoll as CONFIG; "+asItRuns(s.line))
		}
		return nil
	}
	for i, w := range rest {
		if isFile := strict.IsYAML(w.Text) || isTOML(w.Text) || strings.HasSuffix(w.Text, ".json"); isFile &&
			!strings.ContainsAny(w.Text, "=$") && !isValue(rest, i) {
			return s.fault(w.At, fmt.Sprintf("%s names %s beside %s: %s takes one configuration", s.command, w.Text,
				name.Text, s.kind.Program.Name), "start one training for each file, and give each to plimsoll")
		}
	}
	path, text, err := s.find(*name)
	if err != nil {
		return err
	}
	s.to.Config = path
	d := parseAny(path, text)
	if isTOML(path) {
		d, err = strict.ParseTOML(path, text)
	}
	if err != nil || d == nil { // Detect says what is wrong with the file
		return nil
	}
	for _, m := range overrides(rest) {
		r, err := d.Revise(m.Name, m.Value)
		if err != nil {
			return s.fault(m.At, fmt.Sprintf("%s is given over %s, and plimsoll cannot put it into that file", m.Name,
				path), "write it in the file")
		}
		if d = parseAny(path, r.Text); isTOML(path) {
			d, err = strict.ParseTOML(path, r.Text)
		}
		if d == nil || err != nil {
			return s.fault(m.At, fmt.Sprintf("%s cannot be put into %s", m.Name, path), "write it in the file")
		}
		s.to.Texts[path] = r.Text
	}
	return nil
}

// named returns the word that names the configuration, and the arguments without it.
func (s *starter) named() (*shell.Word, []shell.Word) {
	for way := range strings.FieldsSeq(s.kind.ConfigIn) {
		if variable, is := strings.CutPrefix(way, "$"); is {
			if w, at, set := s.line.Variable(variable); set {
				w.At = at
				return &w, s.arguments
			}
			continue
		}
		for i, w := range s.arguments {
			flag, value, given := strings.Cut(strings.TrimPrefix(w.Text, "--"), "=")
			switch isFlag := strings.HasPrefix(w.Text, "--"); {
			case way == "1" && !isFlag && hasEnding(w.Text) && !isValue(s.arguments, i):
				return &w, slices.Concat(s.arguments[:i], s.arguments[i+1:])
			case way == "1" || !isFlag || strings.ReplaceAll(flag, "-", "_") != way:
			case given:
				return &shell.Word{Text: value, At: w.At, Unknown: w.Unknown}, slices.Delete(slices.Clone(s.arguments),
					i, i+1)
			case i+1 < len(s.arguments):
				return &s.arguments[i+1], slices.Delete(slices.Clone(s.arguments), i, i+2)
			}
		}
	}
	return nil, s.arguments
}

// isValue reports whether a word may be the value of the flag before it.
func isValue(words []shell.Word, i int) bool {
	return i > 0 && strings.HasPrefix(words[i-1].Text, "-") && !strings.Contains(words[i-1].Text, "=")
}

// hasEnding reports whether a word ends like the name of a configuration, or may do so.
func hasEnding(text string) bool {
	return strict.IsYAML(text) || isTOML(text) || strings.HasSuffix(text, ".json") || strings.HasPrefix(text, "$")
}

// find returns the path and the text of a file that a script names.
func (s *starter) find(name shell.Word) (string, []byte, error) {
	if strings.Contains(name.Text, "$") {
		what := fmt.Sprintf("the configuration is %s, which the script does not set", name.Text)
		return "", nil, s.fault(name.At, what,
			"give the file to plimsoll in place of the script, with --gpus and --nodes")
	}
	paths := places(s.document.File, name.Text)
	if s.kind.Bundled != "" {
		paths = append(paths, places(s.document.File, fmt.Sprintf(s.kind.Bundled, name.Text))...)
	}
	for _, path := range paths {
		text, err := s.to.Texts.Read(path, largest)
		if err == nil {
			return path, text, nil
		}
		if !errors.Is(err, fs.ErrNotExist) {
			return "", nil, &fault.Input{Where: s.document.Position(name.At), Err: err}
		}
	}
	return "", nil, s.fault(name.At, fmt.Sprintf("the script names %s, which is not here", name.Text),
		"give the path relative to the working directory, to the script or to a folder above it")
}

func (s *starter) fault(at int64, what, hint string) error {
	return s.document.Inputf(at, "%s", what).WithHint(hint)
}

// overrides returns the arguments that go before keys of a file: --key value, and key=value.
func overrides(words []shell.Word) (list []strict.Member) {
	list = commandMembers(words)
	for i, w := range words {
		name, value, is := strings.Cut(w.Text, "=")
		if behindFlag := i > 0 && strings.HasPrefix(words[i-1].Text, "--"); is && !behindFlag &&
			!strings.HasPrefix(w.Text, "-") && looksLikeKey.MatchString(name) {
			list = append(list, strict.Member{Name: name, At: w.At, Value: argument(shell.Word{Text: value, At: w.At})})
		}
	}
	return slices.DeleteFunc(list, func(m strict.Member) bool {
		return m.Value.Kind == '"' && strings.HasPrefix(m.Value.Text, "$") && harmless.MatchString(m.Name)
	})
}

// CountsNodes reports whether an argument or a variable counts nodes.
func CountsNodes(name string) bool {
	return slices.Contains(strings.Fields("nnodes num_nodes num_machines nodes N NNODES PET_NNODES"), name)
}

// unplannedScript returns why a script is refused: the program that it starts, or that it starts several or none.
func unplannedScript(path string, text []byte) error {
	script, in, err := readScript(path, text)
	if err != nil {
		return err
	}
	d := &strict.Document{File: path, Text: text}
	found := trainings(script, in)
	if len(found) > 1 {
		return startsSeveral(d, found)
	}
	line, name, why := programOf(script, in), "", ""
	switch {
	case len(found) == 1:
		line, name, why = found[0].line, found[0].command+", "+article(found[0].kind.Name), found[0].kind.Instead
		if v := launchVariables(found[0].kind); v != nil {
			line.Variables(v[0], v[1])
		}
	case line == nil:
		return noConfiguration(path, cmp.Or(nature(text), "a script that starts no training"), text)
	case line.Module:
		name = moduleOf(line)
	default:
		name = line.Program[0].Text
	}
	if missing := missingParts(script); missing != nil {
		return d.Inputf(missing[0].At, "the script has %s as a part of itself, which is not here, and without it %s "+
			"cannot be planned", missing[0].Name, name).
			WithHint("put the file where the script finds it; or " + asItRuns(line))
	}
	return d.Inputf(line.Program[0].At, "the script starts %s, which plimsoll does not plan on paper", name).
		WithHint(strings.TrimSuffix(asItRuns(line)+"; "+why, "; "))
}

// launchVariables returns the variables that say the ranks of a kind, nil for none.
func launchVariables(k *Kind) []string {
	if len(k.LaunchVariables) == 2 {
		return k.LaunchVariables
	}
	return nil
}

// startsSeveral refuses a script with several trainings, and says where they are and what they depend on.
func startsSeveral(d *strict.Document, found []training) error {
	var lines []string
	hint := "give the command of one training in a script of its own"
	for _, t := range found {
		lines = append(lines, strconv.Itoa(d.Position(t.line.Program[0].At).Line))
		if t.line.Command.Unsure != "" {
			hint = "which of them runs depends on " + t.line.Command.Unsure + ": " + hint
			break
		}
	}
	return d.Inputf(found[0].line.Program[0].At, "the script starts more than one training, in lines %s",
		strings.Join(lines[:min(len(lines), 8)], ", ")).WithHint(hint)
}

// moduleOf returns the name of the module that a line runs.
func moduleOf(line *launcher.Line) string {
	return strings.ReplaceAll(strings.TrimSuffix(line.Program[0].Text, ".py"), "/", ".")
}

// asItRuns says how a program is planned that is not planned on paper.
func asItRuns(line *launcher.Line) string {
	var command []string
	for i, w := range line.Program[:min(len(line.Program), 2)] {
		if i > 0 && strings.HasPrefix(w.Text, "-") {
			break
		}
		command = append(command, w.Text)
	}
	t := trainingOfKind(line)
	switch {
	case t != nil && t.kind.Runs != "":
		command = []string{t.kind.Runs}
	case line.Module:
		command = []string{"python -m", moduleOf(line)}
	case strings.HasSuffix(command[0], ".py"):
		command = []string{"python", command[0]}
	}
	flags := ""
	if line.PerNode != nil {
		flags += fmt.Sprintf(" --gpus %d", line.PerNode.Is)
	}
	if line.Nodes != nil {
		flags += fmt.Sprintf(" --nodes %d", line.Nodes.Is)
	}
	return fmt.Sprintf("'plimsoll plan --gpu NAME%s -- %s ...' plans it as it runs, without a GPU; or give its "+
		"model to plimsoll.plan in Python, or name it by --model and say the rest by flags", flags,
		strings.Join(command, " "))
}

// programOf returns the line of a script that most likely trains: one by a launcher, or of Python, or with most flags.
func programOf(script *shell.Script, in launcher.Allocation) (best *launcher.Line) {
	most := 0
	for _, c := range script.Commands {
		line := launcher.Read(c, in)
		if line == nil || strings.HasPrefix(line.Program[0].Text, "-") ||
			slices.Contains(tools, line.Program[0].Text) {
			continue
		}
		weight := 0
		for _, w := range line.Program {
			if strings.HasPrefix(w.Text, "--") {
				weight++
			}
		}
		if strings.HasSuffix(line.Program[0].Text, ".py") {
			weight += 1 << 11
		}
		if line.By != "" {
			weight += 1 << 10
		}
		if weight > most {
			best, most = line, weight
		}
	}
	return best
}

// tools are commands with flags that train nothing.
var tools = strings.Fields("pip pip3 apt apt-get git wget curl rsync ls cp mkdir rm cat grep sed awk find ray hf " +
	"huggingface-cli nvidia-smi tar cd bash sh ssh scp module source echo printf export kill sleep wait date " +
	"python3 uv sbatch conda")
