package recipe

import (
	"path/filepath"
	"strings"

	"plimsoll/internal/base/files"
	"plimsoll/internal/input/launcher"
	"plimsoll/internal/input/python"
	"plimsoll/internal/input/shell"
)

// sourceKind is the kind of the user's own sources of Python among what scripts start. They train by transformers'
// Trainer or one of its heirs.
var sourceKind = &Kind{Name: "source of Python", Flag: ConfigFlag,
	Program: &Program{Name: "transformers", Hosts: true}}

// sourcesOf returns the sources of Python that a script starts, that are here, and that say a training.
func sourcesOf(path string, s *shell.Script, in launcher.Allocation, texts files.Texts) (list []training) {
	for _, c := range s.Commands {
		line := launcher.Read(c, in)
		if line == nil || line.Module || filepath.Ext(line.Program[0].Text) != ".py" {
			continue
		}
		for _, place := range places(path, line.Program[0].Text) {
			text, err := texts.Read(place, largest)
			if err != nil {
				continue
			}
			if parsePython(place, text, nil) != nil {
				list = append(list, training{line: line, kind: sourceKind, command: place,
					arguments: line.Program[1:]})
			}
			break
		}
	}
	return list
}

// source takes the source that a line starts, with the words behind it.
func (s *starter) source() {
	s.to.Config, s.to.Command = s.command, []python.Argument{}
	for _, w := range s.arguments {
		s.to.Command = append(s.to.Command, python.Argument{Text: w.Text, Unknown: len(w.Unknown) > 0 ||
			strings.HasPrefix(w.Text, computed)})
	}
	s.command = s.line.Program[0].Text
}
