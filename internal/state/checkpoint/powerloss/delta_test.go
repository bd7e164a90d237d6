//go:build linux

package powerloss

import (
	"os"
	"path/filepath"
	"testing"

	"plimsoll/internal/state/delta"
)

// TestMessages applies messages to a model, in its place and beside it, and deletes them. After a loss of power there
// are the model before with all of its messages, or the model after.
func TestMessages(t *testing.T) {
	for name, apply := range map[string]func(folder string) error{
		"in place": func(folder string) error {
			_, err := delta.Apply(delta.Application{Messages: []string{folder + "/messages"},
				Model: folder + "/model.safetensors", Delete: true})
			return err
		},
		"beside": func(folder string) error {
			_, err := delta.Apply(delta.Application{Messages: []string{folder + "/messages"},
				Model: folder + "/model.safetensors", Out: folder + "/changed.safetensors", Delete: true})
			return err
		},
		"a folder": func(folder string) error {
			_, err := delta.Apply(delta.Application{Messages: []string{folder + "/messages"},
				Model: folder + "/model", Out: folder + "/changed", Delete: true})
			return err
		},
	} {
		t.Run(name, func(t *testing.T) {
			disk := &recorder{}
			folder := disk.mount(t)
			example := "../../../../examples/deltas"
			put(t, filepath.Join(example, "model.safetensors"), filepath.Join(folder, "model.safetensors"))
			put(t, filepath.Join(example, "model.safetensors"), filepath.Join(folder, "model/model.safetensors"))
			put(t, filepath.Join(example, "model.safetensors"), filepath.Join(folder, "model/config.json"))
			messages, err := filepath.Glob(filepath.Join(example, "*"+delta.Extension))
			if err != nil || messages == nil {
				t.Fatalf("no messages: %v", err)
			}
			for _, path := range messages {
				put(t, path, filepath.Join(folder, "messages", filepath.Base(path)))
			}
			disk.settle()
			began := disk.length()
			before := map[string]string{}
			for _, name := range entries(t, folder) {
				before[name] = digestOf(t, filepath.Join(folder, name))
			}
			if err := apply(folder); err != nil {
				t.Fatal(err)
			}
			after := map[string]string{}
			for _, name := range entries(t, folder) {
				after[name] = digestOf(t, filepath.Join(folder, name))
			}
			eachLoss(t, disk.log, began, often(), func(t *testing.T, left string, operations int) {
				done := true
				for name, want := range after {
					if name == "messages" {
						continue
					}
					got := ""
					if _, err := os.Stat(filepath.Join(left, name)); err == nil {
						got = digestOf(t, filepath.Join(left, name))
					}
					if got != want && got != before[name] {
						t.Errorf("%s has bytes of neither model", name)
					}
					done = done && got == want
				}
				if !done && digestOf(t, filepath.Join(left, "messages")) != before["messages"] {
					t.Errorf("messages are gone, and the model is not changed")
				}
				if !done && operations == len(disk.log) {
					t.Errorf("the model is not changed")
				}
			})
		})
	}
}

// put copies a file.
func put(t *testing.T, from, to string) {
	t.Helper()
	data, err := os.ReadFile(from)
	if err == nil {
		err = os.MkdirAll(filepath.Dir(to), 0o755)
	}
	if err == nil {
		err = os.WriteFile(to, data, 0o644)
	}
	if err != nil {
		t.Fatal(err)
	}
}
