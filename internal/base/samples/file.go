package samples

import (
	"bufio"
	"bytes"
	"encoding/json"
	"errors"
	"fmt"
	"io"

	"plimsoll/internal/base/fault"
	"plimsoll/internal/base/safe"
)

// longestRecord is the limit of a line. A sample of a thousand processes with their mappings has some MB.
const longestRecord = 64 << 20

// Writer writes records.
type Writer struct{ to io.Writer }

// NewWriter returns a writer to a file that was opened with O_APPEND, or to a pipe. Every record is one write.
func NewWriter(to io.Writer) *Writer { return &Writer{to} }

// Write writes one record.
func (w *Writer) Write(r *Record) error {
	line, err := json.Marshal(r)
	if err != nil {
		return err
	}
	_, err = w.to.Write([]byte(safe.Text(string(line)) + "\n"))
	return err
}

// Read calls each for every record of a recording, in order. It returns whether the recording is cut: a last line
// without an end, which it leaves out. The file is the name for errors; these are *fault.Input, but for those of each
// and of the reader.
func Read(file string, from io.Reader, each func(*Record) error) (cut bool, err error) {
	lines := bufio.NewReaderSize(from, 64<<10)
	for number := 1; ; number++ {
		line, err := readLine(lines)
		at := fault.Position{File: file, Line: number, Column: 1}
		switch {
		case errors.Is(err, io.EOF) && number == 1:
			return false, at.Inputf("the recording is empty: it has no full line")
		case errors.Is(err, io.EOF):
			return len(line) > 0, nil
		case errors.Is(err, bufio.ErrTooLong):
			return false, at.Inputf("the line is longer than %d bytes", longestRecord)
		case err != nil:
			return false, err
		}
		var r Record
		if err := json.Unmarshal(line, &r); err != nil {
			return false, &fault.Input{Where: at, What: "this is no record", Err: err}
		}
		if err := r.check(number == 1); err != nil {
			return false, at.Inputf("%v", err)
		}
		if err := each(&r); err != nil {
			return false, err
		}
	}
}

// readLine returns a line without its end. A line that ends with the file comes with io.EOF.
func readLine(lines *bufio.Reader) ([]byte, error) {
	var line []byte
	for {
		part, err := lines.ReadSlice('\n')
		line = append(line, part...)
		switch {
		case err == nil:
			return bytes.TrimSuffix(line[:len(line)-1], []byte{'\r'}), nil
		case !errors.Is(err, bufio.ErrBufferFull):
			return line, err
		case len(line) > longestRecord:
			return nil, bufio.ErrTooLong
		}
	}
}

// check returns an error if the record is none of this schema.
func (r *Record) check(first bool) error {
	if first {
		switch {
		case r.Start == nil:
			return errors.New("this is no recording: its first line is no start")
		case r.Start.Schema != Schema:
			return fmt.Errorf("the schema is %q, but this version reads %q", r.Start.Schema, Schema)
		}
	}
	kinds := 0
	for _, set := range []bool{r.Start != nil, r.Sample != nil, r.Mark != nil, r.Output != nil, r.End != nil} {
		if set {
			kinds++
		}
	}
	switch {
	case kinds != 1:
		return fmt.Errorf("the record has %d kinds: expected one of start, sample, mark, output and end", kinds)
	case r.Start != nil && !first:
		return errors.New("this is a second start")
	case r.Time < 0:
		return fmt.Errorf("time_ns is %d: expected 0 or more", r.Time)
	}
	return nil
}
