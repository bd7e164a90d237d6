package recipe

import (
	"bytes"
	"fmt"
	"path/filepath"
	"slices"
	"strings"

	"plimsoll/internal/base/files"
	"plimsoll/internal/base/lazyregexp"
	"plimsoll/internal/input/launcher"
	"plimsoll/internal/input/recipe/strict"
	"plimsoll/internal/input/shell"
)

// A script of a shell may start a training whose arguments are all on its command line. Such a command is read as a
// document with a member for each argument. Its first member is the name of the command, with underscores.

// several is the name of a script with more than one training.
const several = "several_trainings"

// Several returns a document of more than one training.
func Several(at int64) *strict.Value {
	return &strict.Value{Kind: '{', At: at, Members: []strict.Member{{Name: several, At: at, Value: strict.Of(true)}}}
}

// training is a command of a script that starts a training of a kind.
type training struct {
	line      *launcher.Line
	kind      *Kind
	command   string // the key of the kind's commands
	arguments []shell.Word
	unset     []shell.Word // of the arguments: variables that the script does not set
}

// isScript reports whether a text may be a script by its name and its start. Other texts may be one all the same.
func isScript(file string, text []byte) bool {
	start := bytes.TrimSpace(text)
	what := nature(text)
	return isManifest(text) || bytes.HasPrefix(start, []byte("#!")) || what == shellScript ||
		what == commandArguments || slices.Contains(scriptNames, filepath.Ext(file))
}

// readScript reads a script of a shell, or the commands of a manifest.
func readScript(file string, text []byte) (*shell.Script, launcher.Allocation, error) {
	if isManifest(text) {
		return readManifest(file, text)
	}
	in := launcher.Headers(string(text))
	s, err := shell.Read(file, text, in.Environment(), func(name string) ([]byte, string, error) {
		return openSourced(file, name)
	})
	return s, in, err
}

// openSourced returns the text of a file that a script runs as a part of itself. Scripts name it from the working
// directory or, as users also run them elsewhere, from their own folder.
func openSourced(script, name string) (text []byte, path string, err error) {
	for _, path = range []string{filepath.Clean(name), filepath.Join(filepath.Dir(script), name)} {
		if text, err = files.Read(path, largest); err == nil || filepath.IsAbs(name) {
			return text, path, err
		}
	}
	return nil, "", err
}

// environments are files that set up Python and nothing else.
var environments = lazyregexp.New(`(?:^|/)(?:activate|conda\.sh|mamba\.sh)$`)

// missingParts returns the files that a script runs as a part of itself and that are not here. What only sets up Python
// is left out.
func missingParts(s *shell.Script) (missing []shell.Sourced) {
	for _, f := range s.Sourced {
		if f.Path == "" && !environments.MatchString(f.Name) {
			missing = append(missing, f)
		}
	}
	return missing
}

// sourcedNotes says which files a script runs as a part of itself, and which of them are not here.
func sourcedNotes(d *strict.Document, s *shell.Script) (notes []Note) {
	for _, f := range s.Sourced {
		if f.Path != "" {
			notes = append(notes, Note{Where: d.Position(f.At), What: f.Path + " is read as a part of the script"})
		}
	}
	for _, f := range missingParts(s) {
		notes = append(notes, Note{Where: d.Position(f.At),
			What: f.Name + " is a part of the script, and is not here: what it sets counts as not set"})
	}
	for _, p := range s.Probes {
		notes = append(notes, Note{Where: d.Position(p.At), What: p.Text + " fails: the plan is of NVIDIA's GPUs"})
	}
	return notes
}

// trainings returns the commands of a script that start trainings of kinds that are known.
func trainings(s *shell.Script, in launcher.Allocation) (list []training) {
	for _, c := range s.Commands {
		line := launcher.Read(c, in)
		if line == nil {
			continue
		}
		if t := trainingOfKind(line); t != nil {
			t.arguments, t.unset = withoutUnset(decided(s, t.arguments))
			list = append(list, *t)
		}
	}
	return list
}

// parseCommand returns the training that a script starts as a document, or nil if there is none.
func parseCommand(file string, text []byte) *strict.Document {
	if bytes.HasPrefix(bytes.TrimSpace(text), []byte{'{'}) {
		return nil
	}
	s, in, err := readScript(file, text)
	if err != nil {
		return nil
	}
	found := trainings(s, in)
	if len(found) == 0 {
		return nil
	}
	d := &strict.Document{File: file, Text: text, Root: found[0].root()}
	if len(found) > 1 {
		at := d.Root.At
		d.Root = &strict.Value{Kind: '{', At: at, Members: []strict.Member{{Name: several, At: at,
			Value: strict.Of(true)}}}
	}
	return d
}

// trainingOfKind returns the training that a line starts, nil for a program that is not known.
func trainingOfKind(line *launcher.Line) *training {
	words := line.Program
	for _, k := range kinds {
		if !k.asked(words) {
			continue
		}
		for command := range k.Commands {
			first, second, two := strings.Cut(command, " ")
			switch {
			case two && len(words) > 1 && filepath.Base(words[0].Text) == first && words[1].Text == second:
				return &training{line: line, kind: k, command: command, arguments: words[2:]}
			case !two && (words[0].Text == first || strings.HasSuffix(words[0].Text, "/"+first)):
				return &training{line: line, kind: k, command: command, arguments: words[1:]}
			}
		}
	}
	return nil
}

// asked reports whether a command has one of the words that those of the kind have.
func (k *Kind) asked(words []shell.Word) bool {
	return k.Asks == "" || slices.ContainsFunc(words, func(w shell.Word) bool {
		word := strings.ReplaceAll(strings.TrimLeft(w.Text, "+"), "_", "-")
		return slices.ContainsFunc(strings.Fields(k.Asks), func(start string) bool {
			return strings.HasPrefix(word, start)
		})
	})
}

// root returns the command as an object with a member for each argument, and with the mark of its kind.
func (t *training) root() *strict.Value {
	at := t.line.Program[0].At
	root := &strict.Value{Kind: '{', At: at}
	mark := strict.Member{Name: t.kind.Commands[t.command], At: at, Value: strict.Of(true)}
	if t.kind.Command != nil {
		root.Members = append(t.kind.Command(slices.Insert(slices.Clone(t.arguments), 0, t.line.Program[0])), mark)
		return root
	}
	if !t.kind.Assigns {
		root.Members = append(commandMembers(t.arguments), mark)
		return root
	}
	root.Members = []strict.Member{mark}
	for i, w := range t.arguments {
		assign(root, w)
		nameConfiguration(root, t.arguments[i:])
	}
	return root
}

// withoutUnset returns arguments without the variables that the script does not set and that are no value of a flag, as
// arrays are not: Bash leaves them out. They may have arguments where the script runs in another environment.
func withoutUnset(words []shell.Word) (kept, unset []shell.Word) {
	for i, w := range words {
		isValue := i > 0 && strings.HasPrefix(words[i-1].Text, "--") && !strings.Contains(words[i-1].Text, "=") &&
			!strings.HasSuffix(w.Text, "[@]}")
		if !isValue && !w.Quoted && len(w.Unknown) == 1 && w.Unknown[0] == w.Text {
			unset = append(unset, w)
		} else {
			kept = append(kept, w)
		}
	}
	return kept, unset
}

// decided returns arguments whose values are those that only a run can tell, where a condition of the script decides
// them.
func decided(s *shell.Script, words []shell.Word) []shell.Word {
	list := slices.Clone(words)
	for i, w := range list {
		u := s.Decided(w)
		isValue := i > 0 && strings.HasPrefix(words[i-1].Text, "--") && !harmlessFlags.MatchString(words[i-1].Text)
		if u != nil && isValue && len(w.Unknown) == 1 && w.Unknown[0] == w.Text {
			list[i].Text = computed + w.Text + decidedBy(u) + ")"
		}
	}
	return list
}

// decidedBy says what decides a variable.
func decidedBy(u *shell.Undecided) string {
	if u.Condition == "" {
		return ", set by a command"
	}
	return " behind the condition " + u.Condition
}

// harmlessFlags matches arguments that no plan depends on, and that scripts often add by a condition.
var harmlessFlags = lazyregexp.New(`^(?:--(?:resume|load|ckpt|checkpoint_dir|no.load|wandb|report.to|run.name|` +
	`tensorboard|logging|log|save|data|dataset|hub|push.to.hub|exit|timing|profile|seed|overwrite)[\w.-]*(?:[= ]|$))`)

// isHarmless reports whether all values of a variable are arguments that no plan depends on.
func isHarmless(u *shell.Undecided) bool {
	for _, value := range u.Values {
		for argument := range strings.SplitSeq(" "+strings.TrimSpace(value), " --") {
			if argument = strings.TrimSpace(argument); argument != "" && !harmlessFlags.MatchString("--"+argument) {
				return false
			}
		}
	}
	return len(u.Values) > 0
}

// unsetNotes says which variables among the arguments of a training count as empty. It refuses the script where a file
// that may set them is missing.
func unsetNotes(d *strict.Document, s *shell.Script, unset []shell.Word) (notes []Note, err error) {
	for _, w := range unset {
		if u := s.Decided(w); u != nil && !isHarmless(u) {
			return nil, d.Inputf(w.At, "%s has arguments of the training%s, which only a run can tell", w.Text,
				decidedBy(u)).
				WithHint(fmt.Sprintf("set %s by itself in a copy of the script, as it is where you train", u.Name))
		} else if u != nil {
			notes = append(notes, Note{Where: d.Position(w.At), What: w.Text + " is left out" + decidedBy(u) +
				": no plan depends on its arguments"})
			continue
		}
		if missing := missingParts(s); missing != nil {
			return nil, d.Inputf(w.At, "%s has arguments of the training, and the script does not set it", w.Text).
				WithHint("put " + missing[0].Name + " where the script finds it, or the arguments into the script")
		}
		notes = append(notes, Note{Where: d.Position(w.At),
			What: w.Text + " counts as empty: the script does not set it"})
	}
	return notes, nil
}

// commandMembers returns a member for each argument. The last of several with one name counts.
func commandMembers(words []shell.Word) []strict.Member {
	var members []strict.Member
	places := map[string]int{}
	for i := 0; i < len(words); {
		flag := words[i]
		i++
		name, is, given := strings.Cut(strings.TrimPrefix(flag.Text, "--"), "=")
		if !strings.HasPrefix(flag.Text, "--") || name == "" {
			continue
		}
		var values []*strict.Value
		if given {
			values = append(values, argument(shell.Word{Text: is, At: flag.At + int64(len(name)) + 3}))
		}
		for ; !given && i < len(words) && !strings.HasPrefix(words[i].Text, "--"); i++ {
			values = append(values, argument(words[i]))
		}
		value := &strict.Value{Kind: '[', At: flag.At, Elements: values}
		switch len(values) {
		case 0:
			value = strict.Of(true)
			value.At = flag.At
		case 1:
			value = values[0]
		}
		name = strings.ReplaceAll(name, "-", "_")
		if place, again := places[name]; again {
			members[place].Value = value
			continue
		}
		places[name] = len(members)
		members = append(members, strict.Member{Name: name, At: flag.At, Value: value})
	}
	return members
}

// argument returns the value of a word: JSON, or a word as in YAML.
func argument(w shell.Word) *strict.Value {
	if strings.HasPrefix(w.Text, "{") && !strings.Contains(w.Text, "$") {
		if d, err := strict.ParseJSON("", []byte(w.Text)); err == nil {
			return placed(d.Root, w.At)
		}
	}
	return strict.Bare(w.Text, w.At)
}

// placed moves a value and all inside it to an offset.
func placed(v *strict.Value, at int64) *strict.Value {
	v.At = at
	for _, e := range v.Elements {
		placed(e, at)
	}
	for i := range v.Members {
		v.Members[i].At = at
		placed(v.Members[i].Value, at)
	}
	return v
}
