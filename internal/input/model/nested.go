package model

import (
	_ "embed"

	"plimsoll/internal/input/recipe/strict"
)

// defaultsText has the defaults of the configurations inside a multimodal
// config.json, by model_type: such a file leaves out what is the default of the
// class. See testdata/defaults.py.
//
//go:embed defaults.json
var defaultsText []byte

// inside returns the scope of a configuration inside this one, such as
// text_config, with the modules of its decoder at body. It has the fields of the
// file, and otherwise those of its class. modelType is its class if the file does
// not say; renamed are old names of classes.
func (s scope) inside(name, modelType, body string, renamed map[string]string) scope {
	v, ok := s.find(name)
	if ok && v.Kind != '{' {
		s.fail(v.At, "", "%s is %s: expected an object", name, v)
	}
	if !ok {
		s.fail(0, Documented, "%s is missing", name)
	}
	return s.nested(v.Members, modelType, body, renamed)
}

// nested returns the scope of a configuration with these fields.
func (s scope) nested(members []strict.Member, modelType, body string, renamed map[string]string) scope {
	c := &config{Document: s.Document, fields: map[string]strict.Member{}}
	for _, m := range members {
		c.fields[m.Name] = m
	}
	modelType = c.textOr(modelType, "model_type")
	if newer, ok := renamed[modelType]; ok {
		modelType = newer
	}
	defaults, err := strict.ParseJSON("defaults.json", defaultsText)
	if err != nil {
		panic(err) // the file is embedded
	}
	if of := defaults.Root.Member(modelType); of != nil {
		for _, m := range of.Value.Members {
			if _, ok := c.fields[m.Name]; !ok {
				c.fields[m.Name] = m
			}
		}
	}
	c.fields["model_type"] = strict.Member{Name: "model_type", Value: strict.Of(modelType)}
	return scope{&construction{config: c, made: s.made, body: body}, ""}
}
