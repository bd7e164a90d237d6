package main

import (
	"fmt"
	"os"
	"regexp"
	"strings"

	"plimsoll/internal/state/optim/kernel/abi"
)

// parts are the ends of the names of files that functions go to. What is not listed stays in the file that avo writes.
var parts = map[string]string{}

// assign sends a kernel to the file of its formats and instruction set. Files stay small enough for reviews and editors.
func assign(function string, state abi.State, moments abi.MomentType, s instructionSet) {
	parts[function] = strings.ToLower(stateName(state) + "_" + moments.String() + "_" + s.name)
}

var (
	sectionStart = regexp.MustCompile(`(?m)^(?:// func |DATA \w+<>\+0\()`)
	functionName = regexp.MustCompile(`^// func (\w+)`)
	tableName    = regexp.MustCompile(`^DATA (\w+)<>`)
	tableUse     = regexp.MustCompile(`(\w+)<>\+?\d*\(SB\)`)
)

// divide moves functions of a written file to files of their own. Each file gets the constants that it uses.
func divide(file string) error {
	text, err := os.ReadFile(file)
	if err != nil {
		return err
	}
	starts := sectionStart.FindAllIndex(text, -1)
	_, header, _ := strings.Cut(string(text[:starts[0][0]]), "\n") // the first line has the paths of the command
	header = generated + header
	var tables []string
	functions, uses := map[string][]string{}, map[string]map[string]bool{} // by part
	for i, start := range starts {
		end := len(text)
		if i+1 < len(starts) {
			end = starts[i+1][0]
		}
		section := strings.TrimRight(string(text[start[0]:end]), "\n") + "\n"
		name := functionName.FindStringSubmatch(section)
		if name == nil {
			tables = append(tables, section)
			continue
		}
		part := parts[name[1]]
		functions[part] = append(functions[part], section)
		if uses[part] == nil {
			uses[part] = map[string]bool{}
		}
		for _, use := range tableUse.FindAllStringSubmatch(section, -1) {
			uses[part][use[1]] = true
		}
	}
	base, found := strings.CutSuffix(file, "_amd64.s")
	if !found {
		return fmt.Errorf("%s: expected a name that ends in _amd64.s", file)
	}
	for part, sections := range functions {
		var used []string
		for _, table := range tables {
			if uses[part][tableName.FindStringSubmatch(table)[1]] {
				used = append(used, table)
			}
		}
		to := file
		if part != "" {
			to = base + "_" + part + "_amd64.s"
		}
		out := header + strings.Join(append(used, sections...), "\n")
		if err := os.WriteFile(to, []byte(out), 0o644); err != nil {
			return err
		}
	}
	return nil
}
