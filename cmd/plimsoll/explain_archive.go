//go:build !page

package main

import (
	"errors"
	"io"
	"os"

	"plimsoll/internal/after/evidence"
	"plimsoll/internal/after/explain"
	"plimsoll/internal/base/fault"
	"plimsoll/internal/show/report"
)

// tar reads the files of a tar archive.
func (r *explainReader) tar(text *evidence.Text) error {
	before := r.members
	cut, err := text.TarMembers(r.member)
	if err == nil && cut {
		r.in.Cut = append(r.in.Cut, text.Name())
	}
	return r.checkArchive(text.Name(), before, err)
}

// zip reads the files of a zip archive. Their list is at its end, so it must be a file.
func (r *explainReader) zip(name string, from io.Reader) error {
	file, isFile := from.(*os.File)
	if isFile {
		_, err := file.Seek(0, io.SeekStart)
		isFile = err == nil
	}
	if !isFile {
		return fault.File(name).Inputf("this is a zip archive, and the list of its files is at its end").
			WithHint("write it to a file, and name that")
	}
	info, err := file.Stat()
	if err != nil {
		return &fault.Input{Where: fault.File(name), Err: err}
	}
	before := r.members
	return r.checkArchive(name, before, evidence.ZipMembers(name, file, info.Size(), r.member))
}

// checkArchive refuses an archive that has shown nothing.
func (r *explainReader) checkArchive(name string, before int, err error) error {
	var input *fault.Input
	switch {
	case err != nil && !errors.As(err, &input):
		return &fault.Input{Where: fault.File(name), Err: err}
	case err == nil && r.members == before:
		return fault.File(name).Inputf("the archive is damaged, or has no file with content: expected logs, counters " +
			"or recordings")
	}
	return err
}

// largestPlan is the limit of a plan in an archive, in bytes.
const largestPlan = 64 << 20

// member reads a file of an archive. What takes a file of its own is left unread and named.
func (r *explainReader) member(text *evidence.Text) error {
	r.members++
	head, err := text.Peek(4 << 10)
	if err != nil && !errors.Is(err, io.EOF) {
		return err
	}
	if isPlan(head) {
		content, err := io.ReadAll(io.LimitReader(text, largestPlan))
		if err != nil {
			return err
		}
		d, err := report.ParsePlan(text.Name(), content)
		if err == nil {
			r.addPlan(text.Name(), d)
		}
		return err
	}
	before := len(r.in.Sources)
	err = r.text(text)
	for _, s := range r.in.Sources[before:] {
		if s.Flag != "" || s.Kind == evidence.Snapshot || s.Kind == evidence.ArchiveFile {
			r.in.Unread = append(r.in.Unread, explain.File{Name: s.Name, Kind: string(s.Kind)})
		}
	}
	return err
}
