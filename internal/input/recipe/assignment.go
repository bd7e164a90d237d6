package recipe

import (
	"bytes"
	"fmt"
	"slices"
	"strings"

	"plimsoll/internal/base/fault"
	"plimsoll/internal/base/lazyregexp"
	"plimsoll/internal/input/recipe/strict"
	"plimsoll/internal/input/shell"
)

// Hydra takes a configuration's values from assignments on the command line: section.key=value.

// isStartedBy reports whether a document stands for a command of a kind.
func isStartedBy(root *strict.Value, k *Kind) bool {
	for _, mark := range k.Commands {
		if root.Member(mark) != nil {
			return true
		}
	}
	return false
}

// assign makes the member that an argument of Hydra assigns: section.key=value. A plus before it adds a key that the
// configuration does not have, and a tilde deletes one: it is null then. The last of several with one name counts.
func assign(root *strict.Value, w shell.Word) {
	path, is, given := strings.Cut(strings.TrimLeft(w.Text, "+"), "=")
	if deleted, tilde := strings.CutPrefix(path, "~"); tilde {
		path, is, given = deleted, "null", true
	}
	if !given || path == "" || path[0] == '-' {
		return
	}
	names := strings.Split(path, ".")
	for _, name := range names[:len(names)-1] {
		m := root.Member(name)
		if m == nil || m.Value.Kind != '{' {
			root.Members = append(root.Members, strict.Member{Name: name, At: w.At,
				Value: &strict.Value{Kind: '{', At: w.At}})
			m = &root.Members[len(root.Members)-1]
		}
		root = m.Value
	}
	last := names[len(names)-1]
	value := argument(shell.Word{Text: is, At: w.At + int64(len(w.Text)-len(is))})
	if is == "null" {
		value = &strict.Value{Kind: 'n', At: value.At}
	}
	if m := root.Member(last); m != nil {
		m.Value = value
		return
	}
	root.Members = append(root.Members, strict.Member{Name: last, At: w.At, Value: value})
}

// configName is the member for the name of Hydra's configuration, which has the defaults of all keys.
const configName = "config_name"

// nameConfiguration makes a member of Hydra's flag that names a configuration, if the first word is it.
func nameConfiguration(root *strict.Value, words []shell.Word) {
	flag, name, given := strings.Cut(words[0].Text, "=")
	if flag != "--config-name" && flag != "-cn" {
		return
	}
	at := words[0].At
	if !given && len(words) > 1 {
		name, at = words[1].Text, words[1].At
	}
	root.Members = append(root.Members, strict.Member{Name: configName, At: at, Value: strict.Bare(name, at)})
}

// reviseAssignment returns a script with another value of an assignment. Everything else stays as it is. Several places
// may assign it: the first counts whose edit is read as this change and no other. A script without one gets the
// assignment before its first other one of the same section.
func reviseAssignment(d *strict.Document, path string, to *strict.Value) (*strict.Revision, error) {
	text, want := string(d.Text), d.Root.Clone()
	says := to.String()
	if to.Kind == '"' && plainWord.MatchString(to.Text) {
		says = to.Text
	}
	var edits []scriptEdit
	if v := want.Find(path); v != nil {
		*v = *to
		for at := range indexesOf(text, path+"=") {
			from, end := unquoted(text, at+len(path)+1, wordEnd(text, at+len(path)+1))
			edits = append(edits, scriptEdit{from, end, says, text[from:end], says})
		}
	} else {
		want.Set(path, 0, to)
		section, _, _ := strings.Cut(path, ".")
		for at := range indexesOf(text, section+".") {
			edits = append(edits, scriptEdit{at, at, fmt.Sprintf("%s=%s \\\n    ", path, says), "", says})
		}
	}
	for _, e := range edits[:min(len(edits), mostTried)] {
		r := &strict.Revision{Text: slices.Concat(d.Text[:e.at], []byte(e.text), d.Text[e.end:]), At: int64(e.at),
			From: e.from, To: e.says}
		if again := parseContent(d.File, r.Text); again != nil && again.Root.Same(want) {
			r.Added = bytes.Count(r.Text, []byte{'\n'}) - bytes.Count(d.Text, []byte{'\n'})
			return r, nil
		}
	}
	return nil, &NotEditable{fault.File(d.File).Inputf("plimsoll cannot change %s in this script and nothing else",
		path)}
}

// plainWord matches a word that neither a shell nor Hydra takes for something else.
var plainWord = lazyregexp.New(`^[A-Za-z][\w.-]*$`)

// indexesOf yields where a word begins in a text with a prefix.
func indexesOf(text, prefix string) func(yield func(int) bool) {
	return func(yield func(int) bool) {
		for from := 0; ; {
			n := strings.Index(text[from:], prefix)
			if n < 0 {
				return
			}
			at := from + n
			from = at + len(prefix)
			if (at == 0 || strings.ContainsRune(" \t\n+'\"", rune(text[at-1]))) && !yield(at) {
				return
			}
		}
	}
}
