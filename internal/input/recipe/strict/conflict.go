package strict

import "strings"

// Conflict is a combination of keys that a program refuses at start or in the first step. It has no type of its own, so
// that tables of other packages have a line for each.
type Conflict = struct {
	Is        bool   // whether the file has it
	Path      string // of the key to change
	Why, Hint string
}

// Refuse returns the first conflict that the file has, as an error.
func (r *Reader) Refuse(list []Conflict) error {
	for _, k := range list {
		if k.Is {
			return r.Fault(k.Path, k.Why, k.Hint)
		}
	}
	return nil
}

// Unknown refuses a name at a path that the program does not know.
func (r *Reader) Unknown(path, program string, candidates []string) error {
	name := r.Find(path)
	hint := DidYouMean(name.Text, candidates)
	if hint == "" {
		hint = "it knows " + strings.Join(candidates, ", ")
	}
	return r.Inputf(name.At, "%s is %s, which %s does not know", path, name, program).WithHint(hint)
}
