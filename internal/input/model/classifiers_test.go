package model

import (
	"reflect"
	"regexp"
	"testing"

	"github.com/google/go-cmp/cmp"
	"github.com/google/go-cmp/cmp/cmpopts"

	"plimsoll/internal/input/recipe/strict"
)

// TestRewarding compares each model of the catalog with what a config.json of its reward model describes.
func TestRewarding(t *testing.T) {
	class := regexp.MustCompile(`(ForCausalLM|LMHeadModel)"`)
	compared := 0
	for _, name := range Catalog() {
		m, err := loaded(name)
		if err != nil {
			t.Fatal(err)
		}
		if m.Network == nil { // planned as a range
			continue
		}
		got, err := m.Classifying(1)
		if err != nil || len(m.Parameters) > 1000 { // more take long
			continue
		}
		text, _ := catalogConfig(name)
		text = class.ReplaceAll(text, []byte(`ForSequenceClassification"`))
		text = append([]byte(`{"num_labels": 1,`), text[1:]...)
		doc, err := strict.ParseJSON(name, text)
		if err != nil {
			t.Fatal(err)
		}
		want, err := fromConfig(doc, name, FromCatalog)
		if err != nil {
			t.Fatal(err)
		}
		options := cmp.Options{cmpopts.EquateEmpty(), cmpopts.IgnoreUnexported(Model{})}
		if reflect.DeepEqual(want.Parameters, got.Parameters) { // cmp takes long for thousands
			options = append(options, cmpopts.IgnoreFields(Model{}, "Parameters"))
		}
		if diff := cmp.Diff(want, got, options); diff != "" {
			t.Errorf("%s (-want +got):\n%s", name, diff)
		}
		if again, err := got.Classifying(1); again != got || err != nil {
			t.Errorf("%s: a reward model changes: %v", name, err)
		}
		compared++
	}
	if compared < 40 {
		t.Errorf("only %d models of the catalog have a reward model", compared)
	}
	for _, name := range []string{"bert-base-uncased", "t5-small"} {
		if m, err := Load(name); err == nil {
			if _, err := m.Classifying(1); err == nil {
				t.Errorf("%s has a reward model", name)
			}
		}
	}
}
