// Package amend changes settings in a user's own files. It edits texts where they say a setting, and leaves everything
// else as it is.
package amend

import (
	"errors"
	"fmt"
	"slices"
	"strings"

	"plimsoll/internal/base/files"
	"plimsoll/internal/input/recipe"
	_ "plimsoll/internal/input/recipe/programs" // recognizes files
)

// Setting is a setting with the value that it should have.
type Setting struct {
	Name recipe.Setting
	To   any
}

// Edit is a change of a file.
type Edit struct {
	File   string `json:"file"`
	Line   int    `json:"line"`
	Column int    `json:"column"`
	Key    string `json:"key"`
	From   string `json:"from"` // empty where the file lacks the key
	To     string `json:"to"`
}

// String returns the edit in one line: ds_config.json:7: reduce_bucket_size 5e8 -> 2e8.
func (e Edit) String() string {
	if e.From == "" && strings.HasPrefix(e.Key, "--") && e.To == "true" {
		return fmt.Sprintf("%s:%d: %s (new)", e.File, e.Line, e.Key)
	}
	if e.From == "" {
		return fmt.Sprintf("%s:%d: %s %s (new)", e.File, e.Line, e.Key, e.To)
	}
	return fmt.Sprintf("%s:%d: %s %s -> %s", e.File, e.Line, e.Key, e.From, e.To)
}

// Result is what edits make of files.
type Result struct {
	Texts files.Texts // of changed files
	Edits []Edit
	Rest  []Setting // that no file can say

	added []addition
}

// addition is lines that an edit has added, in the text that it was made from.
type addition struct {
	file        string
	line, lines int
}

// original returns the line of the user's file that is now another.
func (r *Result) original(file string, line int) int {
	for _, a := range slices.Backward(r.added) {
		if a.file == file && line > a.line {
			line -= a.lines
		}
	}
	return line
}

// Apply edits the files that say settings. A setting that no file says goes to the first file that can say it; so files
// of programs come before those of DeepSpeed, which may leave it "auto". An error is that of a text that cannot be
// edited.
func Apply(texts files.Texts, paths []string, settings []Setting) (*Result, error) {
	r := &Result{Texts: files.Texts{}}
	var all []*recipe.Settings
	for _, path := range paths {
		s, err := recipe.LoadSettings(path, texts)
		if err != nil {
			return nil, err
		}
		if s != nil {
			all = append(all, s)
		}
	}
	for _, setting := range settings {
		follows := func(s *recipe.Settings) bool { return s.Follows(setting.Name) != "" }
		if slices.ContainsFunc(all, follows) {
			continue
		}
		if err := r.set(all, setting, accumulates(all, settings)); err != nil {
			return nil, err
		}
	}
	return r, nil
}

// accumulates reports whether a file says by the batch of all ranks that a step has several micro batches.
func accumulates(all []*recipe.Settings, settings []Setting) bool {
	follows := func(s *recipe.Settings) bool { return s.Follows(recipe.Accumulation) == recipe.TrainBatch }
	several := func(s Setting) bool { return s.Name == recipe.Accumulation && s.To != 1 }
	return slices.ContainsFunc(all, follows) && slices.ContainsFunc(settings, several)
}

// set changes one setting. Without a key, the batch of all ranks follows from others, unless accumulation follows from
// it.
func (r *Result) set(all []*recipe.Settings, setting Setting, accumulates bool) error {
	var first *int
	given := false
	for i, s := range all {
		if s.Key(setting.Name) != "" && first == nil {
			first = &i
		}
		if !s.Gives(setting.Name) {
			continue
		}
		given = true
		if err := r.revise(all, i, setting); err != nil {
			return err
		}
	}
	switch {
	case given || setting.Name == recipe.TrainBatch && !accumulates || setting.To == "none": // none is the default
		return nil
	case first == nil:
		r.Rest = append(r.Rest, setting)
		return nil
	}
	if all[*first].IsUnset(setting.Name, setting.To) {
		return nil
	}
	return r.revise(all, *first, setting)
}

// revise changes a setting in one file.
func (r *Result) revise(all []*recipe.Settings, i int, setting Setting) error {
	s := all[i]
	revision, where, err := s.Revise(setting.Name, setting.To)
	if errors.As(err, new(*recipe.NotEditable)) {
		r.Rest = append(r.Rest, setting)
		return nil
	}
	if err != nil {
		return err
	}
	if revision.From == revision.To {
		return nil
	}
	if all[i], err = s.With(revision.Text); err != nil {
		return err
	}
	r.Texts[s.File] = revision.Text
	r.Edits = append(r.Edits, Edit{File: s.File, Line: r.original(s.File, where.Line), Column: where.Column,
		Key: s.Key(setting.Name), From: revision.From, To: revision.To})
	if revision.Added > 0 {
		r.added = append(r.added, addition{s.File, where.Line, revision.Added})
	}
	return nil
}
