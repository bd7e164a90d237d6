package recipe

import (
	"errors"
	"fmt"
	"io/fs"

	"plimsoll/internal/base/fault"
	"plimsoll/internal/base/files"
	"plimsoll/internal/base/lazyregexp"
	"plimsoll/internal/base/version"
	"plimsoll/internal/input/python"
	"plimsoll/internal/input/recipe/deepspeed"
	"plimsoll/internal/input/recipe/peft"
)

// largest is the limit of a file's size. No real configuration comes near it.
// It keeps a wrong file (weights, a log) from being read as a configuration.
const largest = 1 << 20

// Source is what files are read with. The zero value is for the newest release of DeepSpeed, and files as they are.
type Source struct {
	DeepSpeed version.Version // the release that reads its configurations
	Texts     files.Texts     // that stand for files, also for those that files name
	// Releases returns the release of a package of Python, zero where none is known. It may be nil.
	Releases func(pkg string) version.Version
	// Started is the source of Python that a script starts, and Command the words behind it.
	Started string
	Command []python.Argument
}

// release returns the release of a program's package, and whether none is known, so that it is the usual one.
func (s Source) release(p *Program) (of version.Version, assumed bool) {
	if s.Releases != nil && p.Package != "" {
		of = s.Releases(p.Package)
	}
	if of.IsZero() {
		return p.Release, true
	}
	return of, false
}

// of returns a function that parses with a source.
func of[T any](from Source, parse func(string, []byte, Source) (*T, error)) func(string, []byte) (*T, error) {
	return func(file string, text []byte) (*T, error) { return parse(file, text, from) }
}

// load parses the file at path, after checking its kind.
func load[T any](texts files.Texts, path string, what *Kind, parse func(file string, text []byte) (*T, error)) (*T,
	error) {
	text, err := texts.Read(path, largest)
	var notRegular *files.NotRegular
	var tooLarge *files.TooLarge
	switch {
	case errors.Is(err, fs.ErrNotExist):
		hint := fmt.Sprintf("give the path of the %v", what)
		if stage := stageName.FindStringSubmatch(path); what == DeepSpeedKind && stage != nil {
			hint += ", or --zero " + stage[1] + " for a stage without a file"
		}
		return nil, fault.File(path).Inputf("there is no such file").WithHint(hint)
	case errors.As(err, &notRegular):
		return nil, fault.File(path).Inputf("expected a %v: %v", what, notRegular).
			WithHint(fmt.Sprintf("give the path of the %v", what))
	case errors.As(err, &tooLarge):
		return nil, &fault.Input{
			Where: fault.Position{File: path},
			What:  fmt.Sprintf("expected a %v of at most %d bytes", what, largest),
			Err:   errors.Unwrap(err),
		}
	case err != nil:
		return nil, &fault.Input{Where: fault.Position{File: path}, Err: err}
	}
	if err := what.expect(path, text); err != nil {
		return nil, err
	}
	return parse(path, text)
}

// stageName matches how programs name a stage of ZeRO.
var stageName = lazyregexp.New(`^(?i:zero|stage|z)?[-_]?([0-3])$`)

// LoadAdapter reads the file at path.
func LoadAdapter(path string) (*peft.Adapter, error) {
	return load(nil, path, AdapterKind, peft.Parse)
}

// LoadDeepSpeed reads the file at path.
func LoadDeepSpeed(path string, from Source) (*deepspeed.Config, error) {
	return load(from.Texts, path, DeepSpeedKind, func(file string, text []byte) (*deepspeed.Config, error) {
		return deepspeed.Parse(file, text, from.DeepSpeed)
	})
}
