package delta

import (
	"cmp"
	"errors"
	"maps"
	"os"
	"path/filepath"
	"slices"

	"plimsoll/internal/base/fault"
	"plimsoll/internal/base/files"
)

// Application is which messages are applied to which model.
type Application struct {
	Messages []string // files, and folders of files with the [Extension]
	Model    string   // a safetensors file, or a folder of them
	Out      string   // where the changed model goes, in place of Model if it is empty
	Step     uint64   // the step that is wanted; 0 is the last that is complete
	Delete   bool     // delete the messages that lead to the step, or to an earlier one
}

// Result is what became of a model.
type Result struct {
	Step     uint64 // after which its parameters are those of the trainer
	Newest   uint64 // the last step of a message
	Applied  int    // messages
	Tensors  int
	Bytes    int64  // of the parameters
	Checksum uint64 // of the parameters
	Deleted  int    // messages
}

// Apply applies messages to a model: in full, or not at all. It changes a copy of the model and renames it at the end.
// So a process that dies leaves the model as it was, and readers see the old or the new one.
//
// A model may be of any step that the messages know, or of any step at all if they have all parameters. Messages that
// lead to where the model is already are passed over.
func Apply(a Application) (r Result, err error) {
	all, err := list(a.Messages)
	if err != nil {
		return r, err
	}
	wanted, err := all.upTo(a.Step)
	if err != nil {
		return r, err
	}
	r.Step, r.Newest = wanted[len(wanted)-1].To, all[len(all)-1].To
	last, names := wanted.last(), map[string]bool{}
	for i := range last {
		if i > 0 && last[i].of == last[i-1].of {
			continue
		}
		for _, p := range last[i].pieces { // ranks may have a part of a tensor each
			names[p.Name] = true
		}
		r.Tensors = len(names)
		r.Bytes += last[i].bytes
		r.Checksum += last[i].After
	}
	if r.Applied, err = a.replace(wanted); err == nil && a.Delete {
		r.Deleted, err = a.delete(wanted)
	}
	return r, err
}

// delete deletes messages, once the name of the model that has them is safe.
func (a *Application) delete(had series) (deleted int, err error) {
	if err := files.SyncFolder(filepath.Dir(cmp.Or(a.Out, a.Model))); err != nil {
		return 0, err
	}
	for i := range had {
		if err := os.Remove(had[i].path); err != nil {
			return deleted, err
		}
		deleted++
	}
	return deleted, nil
}

// replace makes the changed model, if it is another, and returns how many messages were applied.
func (a *Application) replace(wanted series) (applied int, err error) {
	original, err := openModel(a.Model, os.O_RDONLY)
	if err != nil {
		return 0, err
	}
	defer original.close()
	if original.folder && a.Out == "" {
		return 0, fault.File(a.Model).Inputf("the files of a folder cannot be replaced at one instant").
			WithHint("give --out FOLDER for the changed model")
	}
	ways, err := original.ways(wanted)
	if err == nil && len(ways) > 0 && len(ways[0]) == 0 && a.Out == "" {
		return 0, nil // it is there already
	}
	for _, way := range ways {
		err = original.changed(cmp.Or(a.Out, a.Model), func(copied string) (err error) {
			applied, err = way.change(copied)
			return err
		})
		if !errors.As(err, new(*Differs)) {
			break
		}
	}
	if differs := (*Differs)(nil); errors.As(err, &differs) {
		err = fault.File(a.Model).Inputf("%v", differs)
	}
	return applied, err
}

// ways returns the messages that may lead a model to the last step: from where it is, and from the last step whose
// messages have all parameters. It returns a [Differs] if there are none.
func (m *model) ways(wanted series) (ways []series, err error) {
	f := following{m, map[shard]uint64{}}
	from, err := f.from(wanted)
	if err != nil {
		return nil, err
	}
	if from >= 0 {
		ways = append(ways, wanted[from:])
	}
	if whole := wanted.whole(); whole != nil {
		ways = append(ways, whole)
	}
	if len(ways) == 0 {
		return nil, &Differs{wanted[0].Header, f.sums[wanted[0].of]}
	}
	return ways, nil
}

// change applies messages to a copy of a model, and returns how many.
func (s series) change(copied string) (applied int, err error) {
	m, err := openModel(copied, os.O_RDWR)
	if err != nil {
		return 0, err
	}
	f := following{m, map[shard]uint64{}}
	for i := range s {
		if i > 0 && s[i].To != s[i-1].To {
			f.keep(s[:i].last())
		}
		had, err := f.take(&s[i])
		if err != nil {
			return 0, errors.Join(err, m.close())
		}
		if !had {
			applied++
		}
	}
	for _, file := range m.files {
		err = errors.Join(err, files.ToDisk(file.File))
	}
	return applied, errors.Join(err, m.close())
}

// following is a model that follows a series.
type following struct {
	*model
	sums map[shard]uint64 // the checksums of shards, as far as they are known
}

// sum returns the checksum of the parameters that a message is about.
func (f *following) sum(l *listed) (has uint64, err error) {
	has, known := f.sums[l.of]
	if known {
		return has, nil
	}
	c, err := f.copyOf(l.pieces)
	if err == nil {
		has, err = checksumOf(l.pieces, c)
	}
	f.sums[l.of] = has
	return has, err
}

// keep forgets all checksums but those of a step: ranks may share the parameters otherwise from the next step on.
func (f *following) keep(step series) {
	maps.DeleteFunc(f.sums, func(of shard, _ uint64) bool {
		return !slices.ContainsFunc(step, func(l listed) bool { return l.of == of })
	})
}

// from returns the number of the first message that the model lacks: that of the messages if it lacks none, and -1 if
// it is at no step that the messages know.
func (f *following) from(s series) (int, error) {
	for end := len(s); end > 0; {
		last := s[:end].last()
		after, known := 0, true
		for i := range last {
			has, err := f.sum(&last[i])
			if err != nil {
				return 0, err
			}
			if has == last[i].After {
				after++
			} else {
				known = known && has == last[i].Before
			}
		}
		switch {
		case after == len(last):
			return end, nil
		case known:
			return end - len(last), nil
		}
		end -= len(last)
	}
	return -1, nil
}

// take applies a message, if the model has not had it. It returns a [Differs] if the message does not follow.
func (f *following) take(l *listed) (had bool, err error) {
	has, err := f.sum(l)
	if err != nil || has == l.After {
		return true, err
	}
	m, err := open(l.path)
	if err != nil {
		return false, err
	}
	if m.Header != l.Header {
		return false, fault.File(l.path).Inputf("it has changed while messages were applied").WithHint("try again")
	}
	c, err := f.copyOf(m.Pieces)
	if err == nil {
		err = m.Apply(c, has)
	}
	f.sums[l.of] = l.After
	return false, err
}
